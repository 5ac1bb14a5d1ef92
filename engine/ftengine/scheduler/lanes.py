"""Where a decode step computes experts without a slot: pins them, measures both lanes, chooses the strategy."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError, FtError
from ftengine.experts.pinned import Pinned, Refused, pin, pin_limits, verify_readable
from ftengine.experts.pool import ExpertBank
from ftengine.experts.profile import LaneProfile, lane_profile
from ftengine.experts.split import LaneCosts
from ftengine.memory.gpu import ON_CPU
from ftengine.memory.plan import lane_threads
from ftengine.memory.sizes import gigabytes
from ftengine.memory.vram import DevicePlan
from ftengine.models.gpu.setup import Strategy
from ftengine.models.gpu.strategy import Lanes, choose

log = logging.getLogger(__name__)

THREADS = 4  # registering is mostly the kernel's walk over pages, which threads share


@dataclass(frozen=True)
class LaneChoice:
    """costs: of both lanes while they work side by side, None where they were not measured."""

    strategy: Resolved[Strategy]
    threads: Resolved[int]  # of the CPU's lane
    pinned: Resolved[bool]
    costs: LaneCosts | None = None


def choose_lanes(
    config: EngineConfig,
    banks: Mapping[int, ExpertBank],
    top_k: int,
    plan: DevicePlan,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
) -> LaneChoice:
    """banks: by MoE layer, in host memory; they stay pinned for the process's life. folder: of profile.json.

    Raises FtError: what is asked for needs pinned memory that is refused, or the GPU reads something else there than
    the host wrote.
    """
    threads = lane_threads(config)
    if not banks:
        return LaneChoice(Resolved("resident", "the model has no routed experts"), threads, Resolved(True, "nothing"))
    pinned = pin_banks(banks, device)
    if plan.resident:
        return LaneChoice(Resolved("resident", "all experts fit into the GPU's memory"), threads, pinned)
    if not pinned.value and config.moe_backend == "offload":
        raise ConfigError(f"--moe-backend offload needs pinned memory: {pinned.reason}", "ft serve --moe-backend auto")
    if not pinned.value:
        log.warning(
            "experts are not pinned, so the GPU cannot read them by itself: %s; the CPU computes all that have no "
            "slot, and prompts take longer",
            pinned.reason,
        )
    ordered = [banks[layer] for layer in sorted(banks)]
    profile, origin = lane_profile(folder, ordered, threads.value, dtype, device, readable=pinned.value)
    experts = max(bank.experts for bank in ordered)
    choice = choose(config.moe_backend, len(ordered), experts, top_k, plan.slots.value, lanes_of(profile))
    strategy, reason = choice.strategy, f"{choice.reason}; lanes {origin}"
    if not pinned.value and config.moe_backend == "auto":
        strategy, reason = "hybrid", "experts are not pinned: the CPU computes all that have no slot"
    return LaneChoice(Resolved(strategy, reason), threads, pinned, profile.costs)


def lanes_of(profile: LaneProfile) -> Lanes | None:
    """None where the GPU cannot read the experts, so that there is nothing to choose."""
    link, cpu, together = profile.link, profile.cpu, profile.costs
    if link is None or together is None:
        return None
    return Lanes(LaneCosts(link.a_us, link.b_us, cpu.a_us, cpu.b_us), together, profile.handshake_us)


def pin_banks(banks: Mapping[int, ExpertBank], device: torch.device) -> Resolved[bool]:
    """Whether all are pinned, or why not: then none is. Raises FtError where the GPU does not read what they hold."""
    if os.environ.get("FT_PIN") == "0":
        return Resolved(False, "FT_PIN=0 is set")
    if device.type != "cuda":
        return Resolved(True, "the interpreter reads all memory")
    start, limits = time.perf_counter(), pin_limits()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="pin") as threads:
        outcomes = list(threads.map(lambda bank: pin(bank.blocks, limits), banks.values()))
    refused = next((outcome for outcome in outcomes if isinstance(outcome, Refused)), None)
    if refused is not None:
        for outcome in outcomes:
            if isinstance(outcome, Pinned):
                outcome.close()
        return Resolved(False, refused.reason)
    for layer, bank in banks.items():
        if wrong := verify_readable(bank, device):
            raise FtError(f"{wrong}, in MoE layer {layer}", ON_CPU)
    total = sum(bank.blocks.nbytes for bank in banks.values())
    return Resolved(True, f"{gigabytes(total)} of experts are pinned, in {time.perf_counter() - start:.1f} s")
