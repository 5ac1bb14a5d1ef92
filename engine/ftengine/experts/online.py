"""The split of missing experts, kept the fastest one while the machine changes: what other programs take of the
memory's bandwidth, of the link and of the CPU's cores.

Layers' times come from the steps themselves (layer_times.py), and the lanes' costs from them (learner.py). The split
moves where that makes layers faster by MARGIN. A few layers in a row try another split now and then, so that a lane
that is not in use is known, too; the slower the trials, the rarer: see TRIAL_COST.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import numpy.typing

from ftengine import switches
from ftengine.experts.lane import Lane
from ftengine.experts.layer_times import LayerRecord, LayerTimes
from ftengine.experts.learner import CostLearner
from ftengine.experts.slots import SlotPool
from ftengine.experts.split import TABLES, LaneCosts, fastest, table_by_costs
from ftengine.kernels.triton.buffers import DECODE_TOKENS
from ftengine.kernels.triton.split import TRIED

log = logging.getLogger("ftengine.split")

EVERY = 16  # steps between two looks at the record, which holds 32
JUDGED = 0.2  # seconds between two judgements
MARGIN = 0.03  # of a layer's time: what a move has to gain
SETTLING, FINE = 2.0, 0.01  # for so many seconds after it, less is enough: costs are still on their way
ENOUGH = 32  # layers with missing experts, before they are judged by
TRIAL_COST = 0.005  # of the layers' time
OFTEN, SELDOM = 61, 2.0  # from a trial to the next: layers at least, seconds at most
LINK_LEFT = 0.75  # of the link's time beside what is fetched may go to copies in the background
LEAST_BACKGROUND = 1 / 64
SLACK = 0.25  # of an expert's time on the link, that may be lacking before fewer are prefetched

TRIED_TABLES = range(1, TABLES)

Table = numpy.typing.NDArray[numpy.int16]


def asked_for() -> float | bool:
    """FT_SPLIT, for measurements: `online` (True; the default), `fixed` by the costs measured at the start (False), or
    a fixed share of the missing experts for the CPU, 0..1. Raises ConfigError."""
    return switches.split(os.environ.get("FT_SPLIT", "online"))


@dataclass
class Moves:
    """count: of the split, since the start; at: when it was set or last moved, in seconds of the clock."""

    count: int
    at: float


class OnlineSplit:
    """Of a pool whose split goes by costs, and its CPU lane. `step` before each decode step."""

    def __init__(
        self,
        pool: SlotPool,
        lane: Lane,
        clock: Callable[[], float] = time.monotonic,
        *,
        most_prefetched: int | None = None,
    ) -> None:
        self.pool = pool
        self.learner = CostLearner(pool.costs, pool.top_k)
        self.moves = Moves(0, clock())
        self._lane = lane
        self._clock = clock
        self._record = LayerRecord(pool.tensors)
        self._steps = 0
        self._seen = self._judged = clock()
        self._most_background = pool.background
        self._most_prefetched = pool.prefetch if most_prefetched is None else most_prefetched
        self._every = 0
        self._table = by_costs(pool.costs, pool.top_k)
        self._set()

    @property
    def unmoved(self) -> float:
        """Seconds since the split was set or last moved."""
        return self._clock() - self.moves.at

    def step(self) -> None:
        """Waits for nothing; takes about a millisecond every EVERY steps."""
        self._steps += 1
        if self._record.ready:
            found = self._record.take(self._lane.log())
            if found is not None:
                self.learn(found)
        if self._steps % EVERY == 0:
            self._record.queue()

    def learn(self, times: LayerTimes) -> None:
        now = self._clock()
        self.learner.add(times, now - self._seen)
        self._seen = now
        if now - self._judged >= JUDGED and self.pool.cpu_share is None:
            self._judged = now
            self._judge(now, times.step_us / self.pool.layers, float(times.done.mean()) if len(times) else math.nan)

    def _judge(self, now: float, layer_us: float, experts_us: float) -> None:
        """layer_us: all that a layer of a step takes, attention too; experts_us: of that, from its lookup until its
        experts were computed; NaN where that is not known."""
        self.pool.costs = costs = self.learner.costs
        settling = self.moves.count and now - self.moves.at < SETTLING
        seen = {rows: one for rows, one in self.learner.rows.items() if one.misses[1:].sum() >= ENOUGH}
        before = after = tried = fetched = one_more = 0.0
        better: dict[int, Table] = {}
        for rows, one in seen.items():
            times = costs.layers(len(one.misses) - 1, one.beside)
            best, all_of_them = fastest(times), numpy.arange(len(times))
            now_us, best_us, link_us, cpu_us = (
                _mean(times, one.misses, table) for table in (self._rows(0, rows), best, all_of_them, 0 * all_of_them)
            )
            margin = FINE if settling or min(link_us, cpu_us) < now_us else MARGIN  # no lane alone is to be faster
            if best_us < (1 - margin) * now_us:
                better[rows] = best.astype(numpy.int16)
            before, after = before + now_us, after + best_us
            tried += sum(max(0.0, _mean(times, one.misses, self._rows(n, rows)) - now_us) for n in TRIED_TABLES)
            fetched += float(one.misses @ self._rows(0, rows)) / one.misses.sum() / len(seen)
            one_more += _one_more(times, one.misses) / len(seen)
        if not seen:
            return
        if better:
            for rows, table in better.items():
                self._rows(0, rows)[:] = table
            add_trials(self._table)
            self._moved(now, costs, 1 - after / before, told=not settling)
        every = self._trials(tried / len(TRIED_TABLES) / before, layer_us)
        if better or not 0.7 < every / max(1, self._every) < 1.4:
            self._every = every
            self._set()
        self._background(costs, layer_us, fetched)
        # What hides a copy: a layer as it would be without waiting for copies.
        self._prefetch(costs, layer_us - experts_us + min(before, after) / len(seen), one_more, fetched)

    def _moved(self, now: float, costs: LaneCosts, gain: float, told: bool) -> None:
        self.moves = Moves(self.moves.count + 1, now)
        late = f" and {costs.late:.0%} of them {costs.late_us:.0f} us late" if costs.late >= 0.01 else ""
        log.log(
            logging.INFO if told else logging.DEBUG,
            "the split of missing experts moved: n take %.0f + %.0f n us over the link, %.0f + %.0f n us on the CPU%s; "
            "layers are %.0f%% faster for it",
            costs.a_link, costs.b_link, costs.a_cpu, costs.b_cpu, late, 100 * gain,
        )  # fmt: skip

    def _trials(self, cost: float, layer_us: float) -> int:
        """Layers from one trial to the next. cost: of a trial's layer, in layers."""
        seldom = 1e6 * SELDOM / layer_us if layer_us > 0 else 4096
        every = int(max(OFTEN, min(TRIED.value * cost / TRIAL_COST, seldom)))
        while math.gcd(every, self.pool.layers) > 1:  # so that all layers have their turn
            every += 1
        return every

    def _background(self, costs: LaneCosts, layer_us: float, fetched: float) -> None:
        """Copies behind the steps must not become what steps wait for, where the link is slow."""
        if not (layer_us > 0 and costs.b_link > 0):
            return
        room = LINK_LEFT * (layer_us - costs.b_link * fetched) / costs.b_link
        budget = min(self._most_background, max(LEAST_BACKGROUND, room))
        now = self.pool.background
        if budget != now and (budget == self._most_background or not 0.8 < budget / max(LEAST_BACKGROUND, now) < 1.25):
            self.pool.set_background(budget)

    def _prefetch(self, costs: LaneCosts, hidden_us: float, one_more_us: float, fetched: float) -> None:
        """As many experts as cross the link in `hidden_us` beside those that are fetched; for the last one a layer may
        wait as long as the lanes would take for one more."""
        if not (hidden_us > 0 and costs.b_link > 0):
            return
        room = max(0.0, (hidden_us + one_more_us) / costs.b_link - fetched)
        more, fewer = (min(self._most_prefetched, int(room + part)) for part in (0.0, SLACK))
        if room < 1:  # of one, every layer would wait; of two or more, only those that miss so many
            more = fewer = 0
        now = self.pool.prefetch
        if more > now or fewer < now:
            self.pool.set_prefetch(more if more > now else fewer)

    def _rows(self, number: int, rows: int) -> Table:
        return self._table[number, rows - 1, : rows * self.pool.top_k + 1]

    def _set(self) -> None:
        self.pool.set_split(self._table)
        self.pool.set_trials(self._every)


def by_costs(costs: LaneCosts, top_k: int) -> Table:
    """int16 [TABLES, DECODE_TOKENS, M]: the fastest split, and its trials."""
    table = table_by_costs(costs, DECODE_TOKENS, top_k)
    add_trials(table)
    return table


def add_trials(table: Table) -> None:
    """Beside the split in use: one expert more and one fewer over the link, then a quarter of the missing ones."""
    misses, used = numpy.arange(table.shape[2]), table[0]
    one, several = numpy.minimum(misses, 1), numpy.maximum(2, misses // 4)
    for number, shift in zip(TRIED_TABLES, (one, -one, several, -several), strict=True):
        # Where there is no room on that side, the other one is tried; where there is none, all that there is.
        tried = numpy.where((used + shift < 0) | (used + shift > misses), used - shift, used + shift)
        table[number] = numpy.clip(tried, 0, misses)


def _one_more(times: numpy.typing.NDArray[numpy.float64], misses: numpy.typing.NDArray[numpy.float64]) -> float:
    """Microseconds that one more missing expert takes, in the mean."""
    best = times.min(1)
    return float(misses[:-1] @ (best[1:] - best[:-1])) / max(1.0, float(misses[:-1].sum()))


def _mean(
    times: numpy.typing.NDArray[numpy.float64],
    misses: numpy.typing.NDArray[numpy.float64],
    fetched: numpy.typing.NDArray[numpy.integer],
) -> float:
    """Microseconds of a layer where so many experts were missing so often. times: of LaneCosts.layers."""
    return float(misses @ times[numpy.arange(len(misses)), fetched]) / float(misses.sum())
