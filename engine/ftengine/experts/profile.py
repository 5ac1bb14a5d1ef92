"""`profile.json`: what was measured of this machine's two lanes, kept between starts. docs/profile.md is its schema.

What does not fit the file, the machine or the model at hand is never used, and the log says why.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ftengine.atomic import write_atomically
from ftengine.experts.profile_key import Key, Known, words
from ftengine.experts.split import LaneCosts
from ftengine.locks import locked

if TYPE_CHECKING:  # who only reads the file needs neither torch nor Triton
    import torch

    from ftengine.experts.cpu_probe import CpuProbe
    from ftengine.experts.pool import ExpertBank
    from ftengine.experts.probe import LaneProbe

log = logging.getLogger("ftengine.profile")

FILE_NAME, LOCK_NAME = "profile.json", ".profile.json.lock"
VERSION = 1
KEPT = 16  # measurements of other models and settings, the newest first
MISSES = range(1, 9)
SECONDS = 2.8  # that the lanes are measured for, where they are slow: with fewer numbers of experts
THRESHOLD = 2.0  # of the published rule: so many times the link's bandwidth the CPU's must be for the two to share
# Times that a line may miss one of its points by: of a lane that is twice as fast as its line says, the published rule,
# whose threshold is two, says something else. A quiet machine's times are within a fifth
WORST = 2.0

Done = Callable[[float], None]  # fraction of a measurement, 0..1


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
    read_bytes_per_second: float | None = None  # of host memory, by all threads
    copy_bytes_per_second: float | None = None  # of pinned memory to the GPU, by its copy engine

    def __post_init__(self) -> None:
        """Raises ValueError for a profile from which no split follows."""
        if not (math.isfinite(self.handshake_us) and self.handshake_us >= 0):
            raise ValueError(f"{self.handshake_us} is not a time")
        for rate in (self.read_bytes_per_second, self.copy_bytes_per_second):
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{rate} is not a bandwidth")
        if len({times is None for times in (self.link, self.link_beside, self.cpu_beside)}) > 1:
            raise ValueError("the times of a lane are missing")

    @property
    def costs(self) -> LaneCosts | None:
        """For the split, of lanes that work side by side; None where there is only the CPU's."""
        if self.link_beside is None or self.cpu_beside is None:
            return None
        link, cpu = self.link_beside, self.cpu_beside
        return LaneCosts(link.a_us, link.b_us, cpu.a_us, cpu.b_us)

    def bandwidth(self, *lanes: LaneTimes | None) -> float | None:
        """Bytes a second of these lanes together, by what each more expert takes; None where that is unknown."""
        if any(lane is None or not lane.b_us for lane in lanes):
            return None
        return sum(self.expert_bytes / lane.b_us * 1e6 for lane in lanes if lane is not None)

    @property
    def cpu_over_link(self) -> float | None:
        """The CPU's bandwidth in parts of the link's, each alone."""
        return None if self.link is None or not self.cpu.b_us else self.link.b_us / self.cpu.b_us

    @property
    def published_choice(self) -> Literal["hybrid", "offload"] | None:
        """What the published rule recommends: the CPU shares the work where it is more than THRESHOLD times as fast."""
        over = self.cpu_over_link
        return None if over is None else "hybrid" if over > THRESHOLD else "offload"


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
    Of a GPU, times through which no line goes are taken once more, for as long at most; where they are no better, this
    start goes by them, and they are not kept.
    """
    key = Key.of(banks[0].layout, threads, dtype, device)
    found = read(folder, key) if folder is not None else None
    if found is not None and readable == (found.link is not None):
        return found, f"measured on {found.measured}"
    made = _measured(banks, threads, dtype, device, key, readable)
    checked = key.gpu != "none"  # of no machine do the times of Triton's interpreter tell anything
    if checked and (reason := crooked(made)):
        log.info("measuring once more: %s", reason)
        made = _measured(banks, threads, dtype, device, key, readable)
    if checked and (reason := crooked(made)):
        log.warning("what was measured is not kept: %s; this start goes by it, the next one measures again", reason)
        return made, "measured now, while the machine was busy"
    if folder is not None:
        write(folder, made)
    return made, "measured now"


def _measured(
    banks: Sequence[ExpertBank],
    threads: int,
    dtype: torch.dtype,
    device: torch.device | str,
    key: Key,
    readable: bool,
) -> LaneProfile:
    """In SECONDS, with a probe of its own. Raises RuntimeError where a lane fails."""
    from ftengine.experts.probe import LaneProbe

    with closing(LaneProbe(banks, threads, dtype, device)) as probe:
        return measure_lanes(probe, key) if readable else measure_cpu(probe, key, counts=_in_time(probe, SECONDS))


def measure_cpu(
    probe: LaneProbe | CpuProbe,
    key: Key,
    done: Done = lambda fraction: None,
    *,
    counts: Iterable[int] | None = None,
) -> LaneProfile:
    """The CPU's lane alone, with these numbers of experts, or all of the probe. Raises RuntimeError where it fails."""
    us = {}
    for number, n in enumerate(probe.counts if counts is None else counts, 1):
        us[n] = probe.cpu(n)
        done(number / len(probe.counts))
    size = probe.banks[0].layout.used_bytes
    today = datetime.date.today().isoformat()
    return LaneProfile(key, today, size, round(probe.handshake(), 2), LaneTimes.through(us))


def measure_lanes(probe: LaneProbe, key: Key, done: Done = lambda fraction: None) -> LaneProfile:
    """Both lanes, of banks that the GPU can read. Raises RuntimeError where one fails."""
    alone = measure_cpu(probe, key, lambda fraction: done(fraction / 3), counts=_in_time(probe, SECONDS / 2))
    link_us, both = {}, {}
    fewest = min(bank.experts for bank in probe.banks)
    for number, n in enumerate(_in_time(probe, SECONDS), 1):
        link_us[n] = probe.link(n)
        if n == 1 or 2 * n <= fewest:  # the lanes would read the same experts, which caches then hold
            both[n] = probe.both(n, n)
        done((1 + 2 * number / len(probe.counts)) / 3)
    link = LaneTimes.through(link_us)
    link_beside = LaneTimes.through({n: times.link for n, times in both.items()})
    cpu_beside = LaneTimes.through({n: times.cpu for n, times in both.items()})
    ratio = bandwidth_ratio(link, link_beside, cpu_beside)
    made = msgspec.structs.replace(
        alone, link=link, link_beside=link_beside, cpu_beside=cpu_beside, ratio=round(ratio, 4)
    )
    costs = made.costs
    assert costs is not None
    return msgspec.structs.replace(
        made, q=[round(m * ratio, 3) for m in MISSES], fetched=[costs.link_share(m) for m in MISSES]
    )


def _in_time(probe: LaneProbe, seconds: float) -> Iterator[int]:
    """Numbers of experts to measure, from the least on: as long as one more, if it takes no longer than the one
    before, ends when `probe` has spent so much. The first one is there always."""
    took = 0.0
    for n in probe.counts:
        before = probe.spent
        if took and before + took > seconds:
            return
        yield n
        took = probe.spent - before


def bandwidth_ratio(link: LaneTimes, link_beside: LaneTimes, cpu_beside: LaneTimes) -> float:
    """B_P / B_H: the link's bandwidth alone, and what both lanes read from host memory together; at most 1."""
    if not (link.b_us and link_beside.b_us and cpu_beside.b_us):
        return 1.0
    return min(1.0, 1 / link.b_us / (1 / link_beside.b_us + 1 / cpu_beside.b_us))


def crooked(profile: LaneProfile) -> str:
    """Where a lane's times lie on no line, a clause; empty where they do."""
    lanes = {
        "on the CPU": profile.cpu,
        "over the link": profile.link,
        "on the CPU beside the link": profile.cpu_beside,
        "over the link beside the CPU": profile.link_beside,
    }
    for where, lane in lanes.items():
        if lane is None:
            continue
        for n, us in lane.us.items():
            line = lane.a_us + lane.b_us * n
            if max(us, line) > WORST * min(us, line):
                experts = f"{n} expert{'' if n == 1 else 's'}"
                return f"{experts} took {us:.0f} us {where}, where the line through all says {line:.0f}"
    return ""


def read(folder: Path, key: Key) -> LaneProfile | None:
    """The measurement for `key`; None where there is none, and the log says why."""
    found, aside = find(folder, key)
    if aside:
        log.info("what %s holds %s: measuring anew", folder / FILE_NAME, aside)
    return found


def find(folder: Path, wanted: Key | Known) -> tuple[LaneProfile | None, str]:
    """The newest measurement for `wanted`, a key or what is known of one.

    Where there is none: why what `folder`/profile.json holds is not used, a clause; empty where it holds nothing.
    """
    entries = _sections(folder).get("lanes", [])
    nearest: list[str] | None = None
    bent = ""
    for entry in entries if isinstance(entries, list) else []:
        try:
            found = msgspec.convert(entry, LaneProfile, str_keys=True)
        except msgspec.ValidationError as error:
            log.warning("a measurement in %s is left aside: %s", folder / FILE_NAME, error)
            continue
        different = found.key.differences(wanted)
        if not different and not (reason := crooked(found)):
            return found, ""
        if not different:
            bent = bent or f"lies on no line: {reason}"
        elif nearest is None or len(different) < len(nearest):
            nearest = different
    return None, bent or (f"is of another {words(nearest)}" if nearest else "")


def write(folder: Path, profile: LaneProfile) -> str | None:
    """Adds it to `folder`/profile.json, which is whole at any time. Why it is not kept, also logged, or None."""
    try:
        with locked(folder / LOCK_NAME):  # several servers may start at once
            kept = _with(profile, _sections(folder))
            write_atomically(folder / FILE_NAME, (json.dumps(kept, indent=1) + "\n").encode())
    except OSError as error:
        log.warning("what was measured is not kept: %s", error)
        return str(error)
    return None


def _with(profile: LaneProfile, sections: dict[str, Any]) -> dict[str, Any]:
    entry = msgspec.to_builtins(profile, str_keys=True)
    listed = sections.get("lanes")
    others = [other for other in (listed if isinstance(listed, list) else []) if _key_of(other) != entry["key"]]
    return sections | {"version": VERSION, "lanes": [entry, *others][:KEPT]}


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
