"""Two ways to do one thing, timed in turns: what is said of them where a window alone scatters more than they differ.

Windows go A B B A A B B A ...: each pair has its ratio, and what drifts steadily is as often for as against either.
The best of several noisy numbers is above what its owner can do again; a median of ratios is not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

FINALISTS = 2
SMOOTHED = 9  # points of a time line that a median is taken of


@dataclass(frozen=True)
class Window:
    rate: float  # tok/s
    misses: float  # experts without a slot, a layer of a step


@dataclass(frozen=True)
class Paired:
    """Window by window; first[i] and second[i] stood side by side. At least two pairs."""

    first: Sequence[Window]
    second: Sequence[Window]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Of second / first, tok/s; the middle one is the median."""
        ratios = [b.rate / a.rate for a, b in zip(self.first, self.second, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high


def in_turns(pairs: int, first: Callable[[], Window], second: Callable[[], Window]) -> Paired:
    """pairs: even, or one order comes more often than the other."""
    made: tuple[list[Window], list[Window]] = ([], [])
    for number in range(pairs):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            made[which].append((first, second)[which]())
    return Paired(*made)


def best_of(candidates: Sequence[T], measure: Callable[[T], float]) -> tuple[T, dict[T, float]]:
    """And what the first round gave. The first FINALISTS are measured once more: a lucky one is found out then."""
    once = {each: measure(each) for each in candidates}
    finalists = sorted(once, key=once.__getitem__, reverse=True)[:FINALISTS]
    twice = {each: once[each] + measure(each) for each in reversed(finalists)}
    return max(twice, key=twice.__getitem__), once


def typical(windows: Sequence[Window]) -> Window:
    """Medians."""
    return Window(statistics.median(w.rate for w in windows), statistics.median(w.misses for w in windows))


@dataclass(frozen=True)
class Point:
    at: float  # seconds
    rate: float  # tok/s


def settled(points: Sequence[Point], rate: float) -> float | None:
    """Seconds after which running medians stay at `rate` or above; None if they do not in the end.

    A point scatters as much as what is looked for: a single one below is chance, half of SMOOTHED are not.
    """
    rates, reach = [point.rate for point in points], SMOOTHED // 2
    smooth = [statistics.median(rates[max(0, i - reach) : i + reach + 1]) for i in range(len(rates))]
    slow = [i for i, each in enumerate(smooth) if each < rate]
    if not slow:
        return 0.0
    return None if slow[-1] == len(points) - 1 else points[slow[-1]].at


class Stopwatch:
    """A clock, in seconds, that can be made to stand still."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost = 0.0
        self._stopped: float | None = None

    def __call__(self) -> float:
        return (self._clock() if self._stopped is None else self._stopped) - self._lost

    def stop(self) -> None:
        assert self._stopped is None, "it stands still already"
        self._stopped = self._clock()

    def go_on(self) -> None:
        assert self._stopped is not None, "it runs"
        self._lost += self._clock() - self._stopped
        self._stopped = None
