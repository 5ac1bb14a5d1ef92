"""Whether one server is faster than another, or only was.

The interval of a ratio has two parts: runs are drawn anew within each turn (bootstrap, 95 %), and where both were
measured in turns, each turn's own ratio is taken in too. An interval that holds 1 is noise.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from ftlaunch.bench.report import Comparison, Metric, Point, Report, Variant

DRAWS = 2000
CONFIDENCE = 0.95

Turns = list[list[float]]


def compare_turns(report: Report) -> list[Comparison]:
    """Each variant with the first one."""
    first, *others = report.variants
    return [one for other in others for one in compare(first, other, report.metric, in_turns=True)]


def compare_earlier(earlier: Report, report: Report) -> list[Comparison]:
    """Each variant with the earlier one of the same flags or address; where there is none, with the earlier first."""
    found: list[Comparison] = []
    for variant in report.variants:
        same = [old for old in earlier.variants if old.what == variant.what]
        old = (same or earlier.variants)[0]
        renamed = Variant(f"earlier {old.name}", old.what, old.server, old.points)
        found += compare(renamed, variant, report.metric, in_turns=False)
    return found


def compare(first: Variant, second: Variant, metric: Metric, *, in_turns: bool) -> list[Comparison]:
    """At every case that both were measured at."""
    found = []
    for point in second.points:
        other = first.at(point.key)
        before, after = _turns(other, metric), _turns(point, metric)
        if before and after:
            ratio, low, high = speed_ratio(before, after, metric.more_is_better, in_turns=in_turns)
            verdict = _verdict(low, high)
            found.append(Comparison(first.name, second.name, point.key, ratio, low, high, verdict))
    return found


def speed_ratio(
    before: Turns, after: Turns, more_is_better: bool, *, in_turns: bool
) -> tuple[float, float | None, float | None]:
    """How many times as fast, and the interval, which is None where one side has a single sample."""

    def ratio(first: Sequence[float], second: Sequence[float]) -> float:
        a, b = statistics.median(first), statistics.median(second)
        return b / a if more_is_better else a / b

    middle = ratio(_flat(before), _flat(after))
    if min(len(_flat(before)), len(_flat(after))) < 2:
        return middle, None, None
    draw = random.Random(0)
    drawn = sorted(ratio(_drawn(before, draw), _drawn(after, draw)) for _ in range(DRAWS))
    outside = round(DRAWS * (1 - CONFIDENCE) / 2)
    ends = [drawn[outside], drawn[-1 - outside]]
    if in_turns:
        ends += [ratio(a, b) for a, b in zip(before, after, strict=False)]
    return middle, min(ends), max(ends)


def _drawn(turns: Turns, draw: random.Random) -> list[float]:
    return [draw.choice(turn) for turn in turns for _ in turn]


def _flat(turns: Turns) -> list[float]:
    return [sample for turn in turns for sample in turn]


def _turns(point: Point | None, metric: Metric) -> Turns:
    """Samples that a ratio can be made of, turns without any left out."""
    turns = point.turns if point is not None else []
    kept = [[sample for sample in turn.get(metric.name, ()) if sample > 0] for turn in turns]
    return [turn for turn in kept if turn]


def _verdict(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "unknown"
    return "faster" if low > 1 else "slower" if high < 1 else "within noise"
