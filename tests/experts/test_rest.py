"""Whether steps leave the CPU alone, on simulated machines of which either form's time a step is known."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ftengine.experts.rest import LaneRest

Times = Callable[[float], tuple[float, float]]  # now -> milliseconds of a step that asks, and of one that does not
STEP = 3.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Simulated:
    """Steps of one number of rows, one after the other. correlated: how much of what makes a step slow, stays."""

    def __init__(self, seed: int, *, rests: bool = False, scatter: float = 0.23, correlated: float = 0.5) -> None:
        self.clock, self.random = Clock(), random.Random(seed)
        self.rest = LaneRest(rests, self.clock)
        self._scatter, self._correlated, self._text = scatter, correlated, 0.0

    def run(self, times: Times, until: float, rows: int = 1) -> float:
        """Mean milliseconds of a step."""
        began, steps = self.clock.now, 0
        while self.clock.now < until:
            rests = self.rest.step(rows)
            own, kept = self.random.gauss(0, 1), self._correlated
            self._text = kept * self._text + (1 - kept**2) ** 0.5 * own
            spent = times(self.clock.now)[rests] * max(0.5, 1 + self._scatter * self._text)
            self.clock.now += (spent + (10 if self.random.random() < 5e-4 else 0)) / 1e3
            steps += 1
        return 1e3 * (self.clock.now - began) / steps


@pytest.mark.parametrize("correlated", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("resting", [0.5, 0.9, 0.97, 1.0, 1.03, 1.25, 3.0, 20.0, 200.0])
def test_steps_are_about_as_fast_as_the_faster_form(resting: float, rests: bool, correlated: float) -> None:
    """A minute, trials and wrong guesses included, the first seconds not; and that form is the one in use."""
    found = []
    for seed in range(3):
        one = Simulated(seed, rests=rests, correlated=correlated)
        one.run(lambda now: (STEP, resting * STEP), 3.0 if resting < 100 else 50.0)
        mean = one.run(lambda now: (STEP, resting * STEP), one.clock.now + 60)
        found.append(mean / (STEP * min(1.0, resting) + 5e-4 * 10))
        if not 0.96 < resting < 1.04:
            assert one.rest.rests(1) == (resting < 1)
    assert sorted(found)[1] < 1.04


@pytest.mark.parametrize("seed", range(5))
def test_a_load_that_comes_and_goes(seed: int) -> None:
    """Another program takes cores for a minute: ten seconds after either change steps are within 5 % of the best."""

    def times(now: float) -> tuple[float, float]:
        return (2 * STEP, 1.1 * STEP) if 30 <= now < 90 else (STEP, 1.15 * STEP)

    one = Simulated(seed)
    for settled, end, rests in ((10, 30, False), (40, 90, True), (100, 120, False)):
        one.run(times, settled)
        mean = one.run(times, end)
        assert mean < 1.05 * (min(times(settled)) + 5e-4 * 10)
        assert one.rest.rests(1) == rests


def test_each_number_of_rows_has_its_own_form() -> None:
    one = Simulated(1)
    for turn in range(12):
        one.run(lambda now: (STEP, 0.9 * STEP), one.clock.now + 2)
        one.run(lambda now: (2 * STEP, 2.6 * STEP), one.clock.now + 2, rows=2)
        if turn > 8:
            assert one.rest.rests(1)
            assert not one.rest.rests(2)


def test_many_rows_always_use_the_lane() -> None:
    one = Simulated(1, rests=True)
    one.run(lambda now: (STEP, 0.5 * STEP), 20.0, rows=3)
    assert (one.rest.rested, one.rest.moves) == (0, 0)
    one.run(lambda now: (STEP, 0.9 * STEP), 21.0)
    assert one.rest.rests(1)


@pytest.mark.parametrize("told", [True, False])
def test_what_comes_in_between_says_nothing(told: bool) -> None:
    """Prompts of 200 ms between steps, whoever tells of them: no step is compared with one that waited for them."""
    one, trials = Simulated(2, scatter=0.02), []
    for _ in range(300):
        one.run(lambda now: (STEP, 1.1 * STEP), one.clock.now + 0.3)
        if told:
            one.rest.interrupt()
        one.clock.now += 0.2
        trials.append(one.rest.moves)
    assert trials[-1] == 0


def test_a_machine_that_stands_still_for_a_moment_moves_nothing() -> None:
    """Once, in a trial and out of one: two comparisons that are unlike the others have to agree."""
    for stop in itertools.chain((5.0 + n / 50 for n in range(20)), (5.0 + n / 7 for n in range(20))):
        one = Simulated(3, scatter=0.02)
        stopped = []

        def times(now: float, stop: float = stop, stopped: list[float] = stopped) -> tuple[float, float]:
            if now > stop and not stopped:
                stopped.append(now)
                return 150.0, 150.0
            return STEP, 1.05 * STEP

        one.run(times, 20.0)
        assert one.rest.moves == 0


def test_it_begins_as_told_and_counts() -> None:
    clock = Clock()
    rest = LaneRest(True, clock)
    assert rest.step(1)
    assert not rest.step(2)
    assert (rest.rested, rest.moves) == (1, 0)
    assert (rest.rests(1), rest.rests(2)) == (True, False)


def test_a_move_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ftengine.split")
    one = Simulated(4)
    one.run(lambda now: (STEP, 0.8 * STEP) if int(now) // 30 % 2 == 0 else (STEP, 1.3 * STEP), 120.0)
    assert one.rest.moves >= 3
    (told,) = caplog.messages
    assert told == "decode steps of 1 sequence leave the CPU alone from now on: they are faster so"
