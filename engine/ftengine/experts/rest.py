"""Whether decode steps leave the CPU's lane alone: where little is missing, the link alone may be faster.

A layer pays for the way to the CPU whether anything is asked or not: three streams meet in it, and threads that compute
take cores from whoever launches. No model of lanes tells that from what the split gains, so it is measured: for a few
steps now and then the other form is tried, its steps beside those before and after it. What is learnt is of one number
of rows, for more sequences miss more experts. The worse the other form is known to be, the rarer it is tried.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger("ftengine.split")

STEPS, FEW_STEPS = 32, 12  # of a window; few at first, and where the forms are far apart
SKIPPED = 4  # first of a window: launched ahead, or with threads that wake
SCATTER, AS_IF = 0.05, 4  # of a comparison, as a part of a step's time: believed as if so many had shown it
LEAST = 0.005  # of a step's time, that a move has to gain beyond what may be chance
MOST_ROWS = 2  # that are decided on: more miss more, and the way to the CPU is a smaller part of their steps
PREFERRED = 0.02  # of a step's time, that the lane has to gain: cores at rest compile and test, and steps are steadier
MEMORY = 32  # comparisons that the mean goes by
UNLIKE, AGREE = 2.5, 3  # times the scatter: the median of so many comparisons is that far off if the machine changed
FAR = 0.3
KNOWN = 12  # comparisons
COST_AT_FIRST, COST, MOST_COST = 0.02, 0.002, 0.01  # of the steps' time, for trials
BETWEEN, BETWEEN_KNOWN = 3 * STEPS, 16 * STEPS  # steps from one trial to the next at the least
SELDOM = 5.0  # seconds at the most, unless it costs more than MOST_COST
PAUSE = 10.0  # times a step's time: something else was done in between
LONG_PAUSE = 1.0  # seconds; in a trial, whose steps may be that much slower
SLOW = 2.0  # times a window's time: a trial ends before all of its steps are done


@dataclass
class Compared:
    """Of one number of rows. gain: of resting, as the logarithm of a step's time with the lane over that without."""

    rests: bool
    gain: float = 0.0
    variance: float = SCATTER**2
    count: int = 0
    odd: bool = False  # the last comparison was unlike the others: more of them are to tell why
    steps: int = 0  # since the last trial
    moved: bool = False
    _recent: list[float] = field(default_factory=list)

    @property
    def lead(self) -> float:
        """What the other form would gain, as if resting were faster by PREFERRED."""
        gain = self.gain + PREFERRED
        return -gain if self.rests else gain

    @property
    def scatter(self) -> float:
        return math.sqrt(self.variance)

    @property
    def window(self) -> int:
        return FEW_STEPS if not self.count or abs(self.gain) > FAR else STEPS

    def add(self, gain: float) -> bool:
        """Whether the form changes for it."""
        self._recent = [*self._recent, gain][-AGREE:]
        typical = statistics.median(self._recent)
        self.odd = bool(self.count) and abs(gain - self.gain) > UNLIKE * self.scatter
        if self.odd and len(self._recent) == AGREE and abs(typical - self.gain) > UNLIKE * self.scatter:
            self.odd, self.gain, self.count = False, typical, AGREE
        else:
            self._learn(gain)
        if self.count == 1 or self.lead <= LEAST + self.scatter / math.sqrt(self.count):
            return False
        self.rests = not self.rests
        return True

    def _learn(self, gain: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        if self.count > 1:  # a pause in one of the windows is not to count for more than its place
            most = UNLIKE * self.scatter
            gain = min(max(gain, self.gain - most), self.gain + most)
        before = gain - self.gain
        self.gain += before / self.count
        if self.count > 1:
            self.variance += (before * (gain - self.gain) - self.variance) / (self.count + AS_IF)

    def due(self, step_seconds: float) -> bool:
        """Whether the other form is to be tried again."""
        known = self.count >= KNOWN and not self.odd
        least = BETWEEN_KNOWN if known else BETWEEN if self.count > 1 else 0
        lost = (self.window + SKIPPED) * max(0.01, math.expm1(min(-self.lead, 10.0)))  # steps a trial
        most = max(least, SELDOM / step_seconds, lost / MOST_COST)
        return self.steps >= min(max(0.0 if self.odd else lost / (COST if known else COST_AT_FIRST), least), most)


@dataclass
class _Window:
    trial: bool
    times: list[float] = field(default_factory=list)  # seconds of its steps

    @property
    def seconds(self) -> float:
        """Of a step: the mean, of which a pause takes no more than PAUSE steps."""
        times = self.times[min(SKIPPED, len(self.times) - 1) :]
        most = PAUSE * statistics.median(times)
        return statistics.fmean(min(spent, most) for spent in times)


class LaneRest:
    """`step` before each decode step. rests: what one row begins with; more begin with the lane, those of more than
    MOST_ROWS stay with it.

    moves: how often the form changed for good; rested: steps so far that left the lane alone.
    """

    def __init__(self, rests: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self.moves = self.rested = 0
        self._clock = clock
        self._rows: dict[int, Compared] = {1: Compared(rests)}
        self._at = 0  # rows of the step before, 0: unknown
        self._last = 0.0
        self._usual = 0.0  # seconds of a step, by the last window that was no trial; 0: there was none
        self._trial: tuple[float, float] | None = None  # seconds of a step before a trial, and in it
        self._window = _Window(False)

    def rests(self, rows: int) -> bool:
        """The form of steps of so many rows, trials apart."""
        return self._compared(rows).rests

    def interrupt(self) -> None:
        """Other work comes between two decode steps: their times say nothing."""
        self._at = 0

    def step(self, rows: int) -> bool:
        """Whether this step leaves the lane alone."""
        if rows > MOST_ROWS:
            self.interrupt()
            return False
        now, one = self._clock(), self._compared(rows)
        spent, self._last = now - self._last, now
        if rows != self._at or self._paused(spent):
            self._at = rows
            self._begin_anew()
        else:
            one.steps += 1
            self._window.times.append(spent)
            if self._over(one):
                self._end_window(one)
        rests = one.rests != self._window.trial
        self.rested += rests
        return rests

    def _moved(self, one: Compared) -> None:
        self.moves += 1
        log.log(
            logging.DEBUG if one.moved else logging.INFO,
            "decode steps of %d %s %s from now on: they are faster so",
            self._at, "sequence" if self._at == 1 else "sequences",
            "leave the CPU alone" if one.rests else "use the CPU, too,",
        )  # fmt: skip
        one.moved = True
        self._begin_anew()  # what was measured last is of the other form

    def _compared(self, rows: int) -> Compared:
        return self._rows.setdefault(rows, Compared(False))

    def _begin_anew(self) -> None:
        self._window, self._trial, self._usual = _Window(False), None, 0.0

    def _paused(self, spent: float) -> bool:
        most = PAUSE * self._usual
        return bool(self._usual) and spent > (max(most, LONG_PAUSE) if self._window.trial else most)

    def _over(self, one: Compared) -> bool:
        times = self._window.times
        slow = self._window.trial and len(times) > 1 and sum(times) > SLOW * one.window * self._usual
        return slow or len(times) >= one.window + SKIPPED

    def _end_window(self, one: Compared) -> None:
        seconds = self._window.seconds
        if self._window.trial:
            self._trial, one.steps = (self._usual, seconds), 0
            self._window = _Window(False)
            return
        if self._trial is not None:
            before, tried = self._trial
            usual = (before + seconds) / 2
            asking, resting = (tried, usual) if one.rests else (usual, tried)
            if one.add(math.log(asking / resting)):
                self._moved(one)
                return
        self._trial, self._usual = None, seconds
        self._window = _Window(one.due(seconds))
