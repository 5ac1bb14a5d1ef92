"""`profile.json`: what was measured of this machine's two lanes, kept between starts. docs/profile.md is its schema.

What does not fit the file, the machine or the model at hand is never used, and the log says why.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ftengine.experts.pool import ExpertBank
from ftengine.experts.probe import LaneProbe
from ftengine.experts.split import LaneCosts
from ftengine.kernels import native

log = logging.getLogger("ftengine.profile")

FILE_NAME = "profile.json"
VERSION = 1
KEPT = 16  # measurements of other models and settings, the newest first
MISSES = range(1, 9)


class Key(msgspec.Struct, frozen=True):
    """What a measurement holds for; any difference makes it void."""

    gpu: str
    driver: str
    cpu: str
    kernels: str
    threads: int
    gate_up: str
    down: str
    hidden: int
    intermediate: int
    activations: str

    @staticmethod
    def of(banks: Sequence[ExpertBank], threads: int, dtype: torch.dtype, device: torch.device | str) -> Key:
        layout = banks[0].layout
        return Key(
            gpu=_gpu(torch.device(device)),
            driver=_driver(),
            cpu=_cpu(),
            kernels=native.kernel_choice()[0],
            threads=min(threads, native.granted_threads()),
            gate_up=layout.gate_up.name,
            down=layout.down.name,
            hidden=layout.hidden,
            intermediate=layout.intermediate,
            activations=str(dtype).removeprefix("torch."),
        )

    def differences(self, other: Key) -> list[str]:
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


class LaneTimes(msgspec.Struct, frozen=True):
    """Microseconds of a layer by number of experts, and the line a_us + b_us * n through them."""

    us: dict[int, float]
    a_us: float
    b_us: float

    def __post_init__(self) -> None:
        """Raises ValueError for what is no time: JSON as Python reads it knows NaN."""
        for value in (self.a_us, self.b_us, *self.us.values()):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{value} is not a time")

    @staticmethod
    def through(us: Mapping[int, float]) -> LaneTimes:
        return LaneTimes({n: round(time, 2) for n, time in us.items()}, *(round(value, 3) for value in fit(us)))


class LaneProfile(msgspec.Struct, frozen=True):
    """link is None where the GPU cannot read the experts. *_beside: the same while the other lane is as busy."""

    key: Key
    measured: str
    expert_bytes: int
    handshake_us: float
    cpu: LaneTimes
    link: LaneTimes | None = None
    cpu_beside: LaneTimes | None = None
    link_beside: LaneTimes | None = None
    ratio: float | None = None  # B_P / B_H
    q: list[float] = []  # q* = m * ratio for m = 1..8 missing experts
    fetched: list[int] = []  # how many of them the costs of both lanes send over the link

    def __post_init__(self) -> None:
        """Raises ValueError for a profile from which no split follows."""
        if not (math.isfinite(self.handshake_us) and self.handshake_us >= 0):
            raise ValueError(f"{self.handshake_us} is not a time")
        if len({times is None for times in (self.link, self.link_beside, self.cpu_beside)}) > 1:
            raise ValueError("the times of a lane are missing")

    @property
    def costs(self) -> LaneCosts | None:
        """For the split, of lanes that work side by side; None where there is only the CPU's."""
        if self.link_beside is None or self.cpu_beside is None:
            return None
        link, cpu = self.link_beside, self.cpu_beside
        return LaneCosts(link.a_us, link.b_us, cpu.a_us, cpu.b_us)


def fit(us: Mapping[int, float]) -> tuple[float, float]:
    """The least squares' a >= 0, b >= 0 of a + b * n."""
    n, count = list(us), len(us)
    mean_n, mean_us = sum(n) / count, sum(us.values()) / count
    spread = sum((x - mean_n) ** 2 for x in n)
    b = sum((x - mean_n) * us[x] for x in n) / spread if spread else 0.0
    a = mean_us - b * mean_n
    if b < 0:
        return mean_us, 0.0
    if a < 0 or not spread:  # the line through nought
        return 0.0, sum(x * us[x] for x in n) / sum(x * x for x in n)
    return a, b


def lane_profile(
    folder: Path | None,
    banks: Sequence[ExpertBank],
    threads: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    readable: bool = True,
) -> tuple[LaneProfile, str]:
    """What `folder`/profile.json has for this machine and these experts, else what is measured now and kept there.

    And where it comes from, for the log. readable: the GPU can read the banks. Raises RuntimeError where a lane fails.
    """
    key = Key.of(banks, threads, dtype, device)
    found = read(folder, key) if folder is not None else None
    if found is not None and readable == (found.link is not None):
        return found, f"measured on {found.measured}"
    probe = LaneProbe(banks, threads, dtype, device)
    try:
        made = measure(probe, key, readable)
    finally:
        probe.close()
    if folder is not None:
        write(folder, made)
    return made, "measured now"


def measure(probe: LaneProbe, key: Key, readable: bool = True) -> LaneProfile:
    today = datetime.date.today().isoformat()
    size = probe.banks[0].layout.used_bytes
    cpu = LaneTimes.through({n: probe.cpu(n) for n in probe.counts})
    handshake = round(probe.handshake(), 2)
    if not readable:
        return LaneProfile(key, today, size, handshake, cpu)
    link = LaneTimes.through({n: probe.link(n) for n in probe.counts})
    both = {n: probe.both(n, n) for n in probe.counts}
    link_beside = LaneTimes.through({n: times.link for n, times in both.items()})
    cpu_beside = LaneTimes.through({n: times.cpu for n, times in both.items()})
    ratio = bandwidth_ratio(link, link_beside, cpu_beside)
    made = LaneProfile(key, today, size, handshake, cpu, link, cpu_beside, link_beside, round(ratio, 4))
    costs = made.costs
    assert costs is not None
    return msgspec.structs.replace(
        made, q=[round(m * ratio, 3) for m in MISSES], fetched=[costs.link_share(m) for m in MISSES]
    )


def bandwidth_ratio(link: LaneTimes, link_beside: LaneTimes, cpu_beside: LaneTimes) -> float:
    """B_P / B_H: the link's bandwidth alone, and what both lanes read from host memory together; at most 1."""
    if not (link.b_us and link_beside.b_us and cpu_beside.b_us):
        return 1.0
    return min(1.0, 1 / link.b_us / (1 / link_beside.b_us + 1 / cpu_beside.b_us))


def read(folder: Path, key: Key) -> LaneProfile | None:
    """The measurement for `key`; None where there is none, and the log says why."""
    entries = _sections(folder).get("lanes", [])
    nearest: list[str] | None = None
    for entry in entries if isinstance(entries, list) else []:
        try:
            found = msgspec.convert(entry, LaneProfile, str_keys=True)
        except msgspec.ValidationError as error:
            log.warning("a measurement in %s is left aside: %s", folder / FILE_NAME, error)
            continue
        different = found.key.differences(key)
        if not different:
            return found
        if nearest is None or len(different) < len(nearest):
            nearest = different
    if nearest is not None:
        log.info("what %s holds is of another %s: measuring anew", folder / FILE_NAME, ", ".join(nearest))
    return None


def write(folder: Path, profile: LaneProfile) -> None:
    """Adds it to `folder`/profile.json, which is whole at any time. A folder that cannot be written is only logged."""
    sections = _sections(folder)
    entry = msgspec.to_builtins(profile, str_keys=True)
    listed = sections.get("lanes")
    others = [other for other in (listed if isinstance(listed, list) else []) if _key_of(other) != entry["key"]]
    sections |= {"version": VERSION, "lanes": [entry, *others][:KEPT]}
    path, draft = folder / FILE_NAME, folder / f".{FILE_NAME}.{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_text(json.dumps(sections, indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        log.warning("what was measured is not kept: %s", error)
    finally:
        try:
            draft.unlink(missing_ok=True)
        except OSError:
            pass


def _key_of(entry: Any) -> Any:
    return entry.get("key") if isinstance(entry, dict) else None


def _sections(folder: Path) -> dict[str, Any]:
    """The file's content; empty where it is missing, damaged or of another version."""
    path = folder / FILE_NAME
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is left aside: %s", path, error)
        return {}
    return found


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory >> 20} MiB"


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    if found:
        return found.group(1)
    return f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "none"


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()
