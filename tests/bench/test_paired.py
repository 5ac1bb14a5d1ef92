"""Windows in turns, against numbers that are known: a speed that drifts, and noise of the size that a GPU's has."""

from __future__ import annotations

import random
import statistics

import pytest

from ftengine.bench.paired import Point, Stopwatch, Window, best_of, in_turns, settled, typical


class Drifting:
    """A machine that becomes 1 % slower with each window; the second way is 3 % slower than the first."""

    def __init__(self) -> None:
        self.order = ""

    def window(self, name: str, speed: float) -> Window:
        self.order += name
        return Window(speed * (1 - 0.01 * len(self.order)), misses=1.0)

    def first(self) -> Window:
        return self.window("A", 200.0)

    def second(self) -> Window:
        return self.window("B", 194.0)


def test_a_drift_is_for_neither() -> None:
    """Always the first one first, each ratio would be 1 % lower."""
    machine = Drifting()
    paired = in_turns(8, machine.first, machine.second)
    assert machine.order == "ABBA" * 4
    low, middle, high = paired.quartiles
    assert middle == pytest.approx(0.97, abs=0.001)
    assert low < middle < high
    assert high - low == pytest.approx(0.02, abs=0.005)


def test_a_median_of_pairs_tells_what_the_best_of_noisy_windows_hides() -> None:
    """Two equal ways, 3 % of noise: the best of six single windows is some 4 % above either."""
    noise = random.Random(5)

    def window() -> Window:
        return Window(200 * noise.lognormvariate(0, 0.03), 1.2)

    best = statistics.mean(max(window().rate for _ in range(6)) for _ in range(200))
    assert best > 1.03 * 200
    medians = [in_turns(8, window, window).quartiles[1] for _ in range(200)]
    assert statistics.mean(medians) == pytest.approx(1.0, abs=0.01)
    assert sum(abs(median - 1) > 0.05 for median in medians) < 10


def test_what_was_lucky_once_is_not_the_best() -> None:
    """The second in truth gives 215 at first, where the best one has its 210 twice; the worst are measured once."""
    asked: list[str] = []
    lucky = {"second": [215.0, 200.0], "best": [210.0, 210.0], "third": [190.0], "last": [100.0]}

    def measure(name: str) -> float:
        asked.append(name)
        return lucky[name].pop(0)

    assert best_of(["last", "third", "best", "second"], measure) == (
        "best",
        {"last": 100.0, "third": 190.0, "best": 210.0, "second": 215.0},
    )
    assert asked == ["last", "third", "best", "second", "best", "second"]


def test_typical_is_the_middle() -> None:
    assert typical([Window(1.0, 5.0), Window(9.0, 1.0), Window(2.0, 2.0)]) == Window(2.0, 2.0)


def line(slow: float, seconds: float, end: float = 200.0, seed: int = 0) -> list[Point]:
    """150 tok/s for `slow` seconds, then `end`; each point off by 5 %."""
    noise = random.Random(seed)
    times = [0.25 * (number + 1) for number in range(int(4 * seconds))]
    return [Point(at, (150.0 if at <= slow else end) * noise.lognormvariate(0, 0.05)) for at in times]


@pytest.mark.parametrize("slow", [2.0, 4.0, 6.0])
def test_it_is_found_when_a_noisy_line_settles(slow: float) -> None:
    found = [settled(line(slow, 10.0, seed=seed), 190.0) for seed in range(20)]
    times = [at for at in found if at is not None]
    assert len(times) >= 19
    assert statistics.median(times) == pytest.approx(slow, abs=0.5)


def test_what_was_never_slow_and_what_stays_slow() -> None:
    assert sum(settled(line(0.0, 10.0, seed=seed), 190.0) == 0.0 for seed in range(20)) >= 16
    assert settled(line(10.0, 10.0), 190.0) is None
    assert settled(line(2.0, 10.0, end=170.0), 190.0) is None


def test_a_stopwatch_stands_still_and_goes_on() -> None:
    now = 5.0
    watch = Stopwatch(lambda: now)
    now = 7.0
    watch.stop()
    now = 100.0
    assert watch() == 7.0
    watch.go_on()
    now = 101.0
    assert watch() == 8.0
