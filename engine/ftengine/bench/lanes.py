"""`ft bench bw`: both lanes of missing experts, for experts of any shape and in no more memory than there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from ftengine.bench.memory import last_level_cache
from ftengine.config import EngineConfig
from ftengine.errors import ConfigError, FtError
from ftengine.experts.cpu_probe import CpuProbe
from ftengine.experts.cycle import COUNTS
from ftengine.experts.pinned import Refused, pin, verify_readable
from ftengine.experts.pool import ExpertBank
from ftengine.experts.profile import Done, LaneProfile, measure_cpu, measure_lanes
from ftengine.experts.profile_key import Key
from ftengine.formats.format import NVFP4, ExpertLayout
from ftengine.memory.gpu import ON_CPU
from ftengine.memory.machine import available_memory
from ftengine.memory.plan import lane_threads, resolve_dtype, resolve_threads
from ftengine.memory.sizes import gigabytes

WANTED_BYTES, WANTED_CACHES = 512 << 20, 4  # of experts: so much, or so many times the last-level cache
LEAST_CACHES = 2  # of which less would be found in them
SHARE = 0.5  # of free memory that they may take
LEAST = 2  # experts: one a lane

Show = Callable[[str, float], None]  # stage, fraction 0..1


@dataclass(frozen=True)
class Setting:
    """As `ft serve` would compute such experts. device: "cuda" or "cpu"; threads: of the CPU."""

    layout: ExpertLayout
    device: str
    threads: int
    dtype: torch.dtype

    @staticmethod
    def of(layout: ExpertLayout, device: str, threads: int | None = None) -> Setting:
        """threads: None for as many as it takes."""
        if device == "cpu":
            count = resolve_threads(threads).value
        else:
            count = lane_threads(EngineConfig("", moe_cpu_threads=threads)).value
        return Setting(layout, device, count, getattr(torch, resolve_dtype("auto", device=device).value))

    @property
    def key(self) -> Key:
        return Key.of(self.layout, self.threads, self.dtype, self.device)


def measure(setting: Setting, show: Show) -> tuple[LaneProfile, str]:
    """And why nothing crosses the link, a clause; empty if it does, or if there is no GPU.

    Raises ConfigError, FtError, torch.OutOfMemoryError, and RuntimeError where a lane fails.
    """
    name = setting.layout.gate_up.name
    show(f"Filling memory with experts in {name}", 0.0)
    bank = bank_that_fits(setting.layout)

    def done(fraction: float) -> None:
        show(f"Measuring experts in {name}", fraction)

    done(0.0)
    if setting.device == "cpu":
        return measure_cpu(CpuProbe([bank], setting.threads, setting.dtype), setting.key, done), ""
    return measure_both(bank, setting, done)


def measure_both(bank: ExpertBank, setting: Setting, done: Done) -> tuple[LaneProfile, str]:
    """As `measure`. On the device "cpu" in Triton's interpreter."""
    from ftengine.experts.probe import LaneProbe

    with (
        pinned_bank(bank, setting.device) as refused,
        closing(LaneProbe([bank], setting.threads, setting.dtype, setting.device)) as probe,
    ):
        return (measure_cpu if refused else measure_lanes)(probe, setting.key, done), refused


def experts_for(layout: ExpertLayout, available: int, bound: str, cache: int | None = None) -> int:
    """How many experts are enough that caches do not hold what is read, or as many as there is room for.

    available: bytes, and `bound` says what sets them; cache: bytes of the largest one. Raises ConfigError where there
    is not even room for one expert a lane, or for more than that cache.
    """
    block, cache = layout.block_bytes, last_level_cache() if cache is None else cache
    wanted = max(WANTED_BYTES, WANTED_CACHES * cache, 2 * max(COUNTS) * block)
    least = max(LEAST * block, LEAST_CACHES * cache)
    room = int(SHARE * available)
    if room < least:
        smaller = layout.gate_up is not NVFP4 and least > LEAST_CACHES * cache
        raise ConfigError(
            f"measuring experts of {block / 1e6:.2f} MB needs {gigabytes(round(least / SHARE))} of free memory, "
            f"{gigabytes(available)} are there ({bound})",
            "close other programs" + (", or measure a smaller format: ft bench bw --dtype nvfp4" if smaller else ""),
        )
    return max(LEAST, min(wanted, room) // block)


def bank_that_fits(layout: ExpertLayout) -> ExpertBank:
    """Raises ConfigError."""
    from ftengine.bench.layer import random_bank

    available, bound = available_memory()
    count = experts_for(layout, available, bound)
    try:
        return random_bank(layout, count)
    except MemoryError as error:
        raise ConfigError(f"there is no memory for {count} experts: {error}", "close other programs") from error


@contextmanager
def pinned_bank(bank: ExpertBank, device: torch.device | str) -> Iterator[str]:
    """For the block, what `device` reads by itself. Gives why it cannot, a clause; empty if it can.

    Raises FtError where it reads something else than is there.
    """
    if torch.device(device).type != "cuda":
        yield ""  # Triton's interpreter reads all memory
        return
    outcome = pin(bank.blocks)
    if isinstance(outcome, Refused):
        yield outcome.reason
        return
    try:
        if wrong := verify_readable(bank, device):
            raise FtError(wrong, ON_CPU)
        yield ""
    finally:
        outcome.close()
