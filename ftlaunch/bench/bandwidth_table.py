"""What `ft bench bw` found, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ftengine.experts.profile import MISSES, THRESHOLD, LaneProfile, LaneTimes
from ftlaunch.bench.bandwidth import Result
from ftlaunch.machine.verdict import rate

SCHEMA = 1
DISTURBED = 1.15  # times what there is at best cannot be: that was measured while others took their part


def heading(whose: str, result: Result) -> list[str]:
    """Above the table."""
    profile, key = result.profile, result.profile.key
    formats = key.gate_up if key.gate_up == key.down else f"{key.gate_up}, {key.down}"
    where = key.cpu if key.gpu == "none" else f"{key.gpu} (driver {key.driver}), {key.cpu}"
    threads = f"{key.threads} thread{'s' * (key.threads > 1)}"
    return [
        where,
        f"experts of {whose}: {key.intermediate} x {key.hidden}, {formats}, {profile.expert_bytes / 1e6:.2f} MB each; "
        f"one row, {key.activations}; {threads} of {key.kernels} kernels",
        "measured now" if result.now else f"measured on {profile.measured}; --fresh measures again",
    ]


def rows(profile: LaneProfile) -> tuple[list[str], list[list[str]]]:
    """Microseconds of a layer and bytes a second, by number of experts; a lane that is not there has no columns."""
    lanes = {"link": profile.link, "CPU": profile.cpu}
    beside = {"link": profile.link_beside, "CPU": profile.cpu_beside}
    columns, values = ["experts"], {n: [str(n)] for n in profile.cpu.us}
    for name, lane in lanes.items():
        if lane is not None:
            columns += [f"{name} us", "GB/s"]
            for n, row in values.items():
                row += _cells(lane, n, profile.expert_bytes)
    if all(beside.values()):
        columns += ["both: link us", "CPU us", "GB/s"]
        for n, row in values.items():
            row += _together(beside, n, profile.expert_bytes)
    return columns, list(values.values())


def _cells(lane: LaneTimes, n: int, size: int) -> list[str]:
    us = lane.us.get(n)
    return ["-", "-"] if not us else [f"{us:.1f}", f"{n * size / us / 1e3:.1f}"]


def _together(beside: Mapping[str, LaneTimes | None], n: int, size: int) -> list[str]:
    times = [lane.us.get(n) for lane in beside.values() if lane is not None]
    if not all(times):
        return ["-", "-", "-"]
    return [*(f"{us:.1f}" for us in times if us), f"{sum(n * size / us for us in times if us) / 1e3:.1f}"]


def notes(result: Result, missing: str) -> list[str]:
    """Below the table. missing: why no GPU was measured, empty if one was."""
    profile = result.profile
    found = [_lane("CPU", profile.cpu, profile, profile.read_bytes_per_second, "what all threads read")]
    if profile.link is None:
        return [f"link: not measured, {missing or result.link}", *found]
    link = _lane("link", profile.link, profile, profile.copy_bytes_per_second, "a pinned copy")
    return [link, *found, *_rule(profile)]


def _lane(name: str, lane: LaneTimes, profile: LaneProfile, best: float | None, what: str) -> str:
    found = profile.bandwidth(lane)
    text = f"{name}: {lane.a_us:.1f} + {lane.b_us:.1f} n us for n experts"
    if found is None:
        return text
    text += f"; {rate(found)} by each expert more"
    if best is None:
        return text
    if found > DISTURBED * best:
        return f"{text}, more than {what}, {rate(best)}: other programs read meanwhile, --fresh measures again"
    return f"{text}, {found / best:.0%} of {what}, {rate(best)}"


def _rule(profile: LaneProfile) -> Iterator[str]:
    """Both lanes at once, and what follows: by the published rule, and by what the engine reckons with."""
    link, cpu = profile.link_beside, profile.cpu_beside
    assert link is not None
    assert cpu is not None
    together, alone, over = profile.bandwidth(link, cpu), profile.bandwidth(profile.link), profile.cpu_over_link
    yield (
        f"both at once: link {link.a_us:.1f} + {link.b_us:.1f} n, CPU {cpu.a_us:.1f} + {cpu.b_us:.1f} n us; "
        f"the way to the CPU and back {profile.handshake_us:.1f} us"
    )
    if together is not None and alone is not None and profile.ratio is not None:
        yield f"B_P / B_H: {rate(alone)} / {rate(together)} = {profile.ratio:.2f}"
    if over is not None:
        comparison = "over" if over > THRESHOLD else "not over"
        yield (
            f"published rule: the CPU has {over:.2f} times the link's bandwidth, {comparison} {THRESHOLD}: "
            f"{profile.published_choice}"
        )
    yield _row("missing experts m", [str(m) for m in MISSES])
    yield _row("q* = m B_P / B_H", [f"{q:.1f}" for q in profile.q])
    yield _row("fetched by ft", [str(count) for count in profile.fetched])


def _row(name: str, cells: list[str]) -> str:
    return f"{name:<18}" + "".join(f"{cell:>6}" for cell in cells)


def as_json(whose: str, results: list[Result], missing: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "bench": "bw",
        **facts,
        "model": whose,
        "link_missing": missing or None,
        "lanes": [_result(result) for result in results],
    }


def _result(result: Result) -> dict[str, Any]:
    """profile.json's entry, and what follows from it."""
    profile = result.profile
    return {
        **msgspec.to_builtins(profile, str_keys=True),
        "measured_now": result.now,
        "not_kept": result.kept or None,
        "link_missing": result.link or None,
        "link_bytes_per_second": profile.bandwidth(profile.link),
        "cpu_bytes_per_second": profile.bandwidth(profile.cpu),
        "together_bytes_per_second": profile.bandwidth(profile.link_beside, profile.cpu_beside),
        "rule": {
            "cpu_over_link": profile.cpu_over_link,
            "threshold": THRESHOLD,
            "recommended": profile.published_choice,
        },
    }
