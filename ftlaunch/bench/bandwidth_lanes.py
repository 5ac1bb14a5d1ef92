"""One shape of expert for `ft bench bw`: what profile.json has of it, else what is measured now and kept there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftengine.experts.profile import LaneProfile, crooked, read, write
from ftengine.formats.format import ExpertLayout
from ftengine.memory.machine import available_memory
from ftlaunch.bench.bandwidth import Result
from ftlaunch.machine import gpu_link, memory_read
from ftlaunch.machine.system import System

Show = Callable[[str, float], None]
log = logging.getLogger("ftengine.profile")  # which whoever waits is told of


def measured(layout: ExpertLayout, device: str, threads: int | None, folder: Path, fresh: bool, show: Show) -> Result:
    """From `folder`/profile.json unless `fresh`. device: "cuda" or "cpu"; threads: None for as many as `ft serve` has.

    Raises what `ftengine.bench.lanes.measure` does.
    """
    from ftengine.bench.lanes import Setting, measure

    setting = Setting.of(layout, device, threads)
    known = None if fresh else read(folder, setting.key)
    if known is not None and (device == "cpu" or known.link is not None):
        found, refused, now = known, "", False
    else:  # what could not be pinned then may be now
        found, refused = measure(setting, show)
        now = True
    whole = _with_bandwidths(found, device, show)
    if reason := crooked(whole):
        log.warning("what was measured is not kept: %s; measure again when the machine is quiet", reason)
        return Result(whole, now, reason, refused)
    kept = None if whole == known else write(folder, whole)
    return Result(whole, now, kept or "", refused)


def _with_bandwidths(profile: LaneProfile, device: str, show: Show) -> LaneProfile:
    """What there is at best, for comparison: measured where the profile does not tell yet."""
    read_rate, copy_rate = profile.read_bytes_per_second, profile.copy_bytes_per_second
    if read_rate is None:
        show("Reading memory", 0.0)
        read_rate, _ = memory_read.measure(System(), available_memory()[0])
    if copy_rate is None and device == "cuda":
        show("Copying pinned memory to the GPU", 0.0)
        copy_rate = gpu_link.copy_rate()
    read_rate, copy_rate = (rate and float(round(rate)) for rate in (read_rate, copy_rate))
    return msgspec.structs.replace(profile, read_bytes_per_second=read_rate, copy_bytes_per_second=copy_rate)
