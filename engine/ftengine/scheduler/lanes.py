"""Where a decode step computes experts without a slot: pins them, measures both lanes, chooses the strategy."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
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
from ftengine.models.gpu.strategy import Lanes, Strategy, choose

log = logging.getLogger(__name__)

THREADS = 4  # registering is mostly the kernel's walk over pages, which threads share


class PinnedBanks:
    """outcome: whether all banks are pinned, or why none is.

    Until `close`, which comes after the last step that reads them and before their memory is given back: CUDA goes on
    taking the addresses for pinned, and refuses to copy from what comes to lie there next.
    """

    def __init__(self, outcome: Resolved[bool], pins: Sequence[Pinned] = ()) -> None:
        self.outcome = outcome
        self._pins = list(pins)

    def close(self) -> None:
        """Waits for the GPU. May be called again."""
        while self._pins:
            self._pins.pop().close()


@dataclass(frozen=True)
class LaneChoice:
    """costs: of both lanes while they work side by side, None where they were not measured. rests: see Choice."""

    strategy: Resolved[Strategy]
    threads: Resolved[int]  # of the CPU's lane
    banks: PinnedBanks
    costs: LaneCosts | None = None
    rests: bool = False

    @property
    def pinned(self) -> Resolved[bool]:
        return self.banks.outcome


def choose_lanes(
    config: EngineConfig,
    banks: Mapping[int, ExpertBank],
    top_k: int,
    plan: DevicePlan,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
) -> LaneChoice:
    """banks: by MoE layer, in host memory; pinned until the choice's `banks` are closed. folder: of profile.json.

    Raises FtError: what is asked for needs pinned memory that is refused, or the GPU reads something else there than
    the host wrote. Then nothing stays pinned.
    """
    threads = lane_threads(config)
    if not banks:
        nothing = PinnedBanks(Resolved(True, "nothing"))
        return LaneChoice(Resolved("resident", "the model has no routed experts"), threads, nothing)
    with ExitStack() as undo:
        held = undo.enter_context(closing(pin_banks(banks, device)))
        ordered, readable = [banks[layer] for layer in sorted(banks)], held.outcome.value
        measured = partial(lane_profile, folder, ordered, threads.value, dtype, device, readable=readable)
        strategy, costs, rests = _choose(config, ordered, top_k, plan, held.outcome, measured)
        undo.pop_all()
    return LaneChoice(strategy, threads, held, costs, rests)


def _choose(
    config: EngineConfig,
    banks: Sequence[ExpertBank],
    top_k: int,
    plan: DevicePlan,
    pinned: Resolved[bool],
    measured: Callable[[], tuple[LaneProfile, str]],
) -> tuple[Resolved[Strategy], LaneCosts | None, bool]:
    """Fields of LaneChoice. Raises ConfigError, RuntimeError where a lane fails."""
    if plan.resident:
        return Resolved("resident", "all experts fit into the GPU's memory"), None, False
    if not pinned.value and config.moe_backend == "offload":
        raise ConfigError(f"--moe-backend offload needs pinned memory: {pinned.reason}", "ft serve --moe-backend auto")
    if not pinned.value:
        log.warning(
            "experts are not pinned, so the GPU cannot read them by itself: %s; the CPU computes all that have no "
            "slot, and prompts take longer",
            pinned.reason,
        )
    profile, origin = measured()
    experts = max(bank.experts for bank in banks)
    choice = choose(config.moe_backend, len(banks), experts, top_k, plan.slots.value, lanes_of(profile))
    strategy, reason = choice.strategy, f"{choice.reason}; lanes {origin}"
    if not pinned.value and config.moe_backend == "auto":
        strategy, reason = "hybrid", "experts are not pinned: the CPU computes all that have no slot"
    return Resolved(strategy, reason), profile.costs, choice.rests


def lanes_of(profile: LaneProfile) -> Lanes | None:
    """None where the GPU cannot read the experts, so that there is nothing to choose."""
    link, cpu, together = profile.link, profile.cpu, profile.costs
    if link is None or together is None:
        return None
    return Lanes(LaneCosts(link.a_us, link.b_us, cpu.a_us, cpu.b_us), together, profile.handshake_us)


def pin_banks(banks: Mapping[int, ExpertBank], device: torch.device) -> PinnedBanks:
    """All of them or none. Raises FtError where the GPU does not read what they hold; then none is."""
    if os.environ.get("FT_PIN") == "0":
        return PinnedBanks(Resolved(False, "FT_PIN=0 is set"))
    if device.type != "cuda":
        return PinnedBanks(Resolved(True, "the interpreter reads all memory"))
    start, limits = time.perf_counter(), pin_limits()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="pin") as threads:
        outcomes = list(threads.map(lambda bank: pin(bank.blocks, limits), banks.values()))
    pins = [outcome for outcome in outcomes if isinstance(outcome, Pinned)]
    size, seconds = sum(each.nbytes for each in pins), time.perf_counter() - start
    made = PinnedBanks(Resolved(True, f"{gigabytes(size)} of experts are pinned, in {seconds:.1f} s"), pins)
    with ExitStack() as undo:
        undo.enter_context(closing(made))
        if (refused := next((outcome for outcome in outcomes if isinstance(outcome, Refused)), None)) is not None:
            return PinnedBanks(Resolved(False, refused.reason))
        for layer, bank in banks.items():
            if wrong := verify_readable(bank, device):
                raise FtError(f"{wrong}, in MoE layer {layer}", ON_CPU)
        undo.pop_all()
    return made
