"""What experts cost each lane, learnt from the times of layers (layer_times.py); pure arithmetic, without a clock.

Each lane's time is a line in the experts of both lanes (LaneCosts). It is fitted by least squares of relative errors,
older layers counting less and less. Layers that take CLIP times what is expected are counted apart (Lateness): a pause
of some milliseconds moves nothing, a lane that pauses time and again is known for it. Where many take that long, the
line follows. Where layers say nothing - one number of experts only, a lane that rests - it stays what it was (RIDGE).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy
import numpy.typing

from ftengine.experts.layer_times import Floats, Ints, LayerTimes
from ftengine.experts.split import Beside, LaneCosts

HALF_LIFE = 0.7  # seconds
CLIP = 4.0
SCATTERED = 0.2
FEW = 8.0  # layers of a look that count for half
ANOTHER, STALE = 0.2, 0.1  # where a line has changed by more, logarithmically, what was seen before counts for less
LITTLE = 0.1  # of a layer's time: as far as a part that was nothing goes as easily as others double
EACH, BESIDE = 1, 2  # places in a line
SLOWED = 2.0  # a lane beside the other one takes so many times as much more at the most
BELIEVED = 4.0  # times in time for each that was to be expected late: exp(-4) of chance
REMEMBERED = 16.0  # layers that a line goes by whatever the time
MEMORY = 96.0  # layers that are remembered whatever the time
RIDGE = 0.25  # as if so many layers, each as far off as is usual, had said what is believed already
UNLIKE = 16.0  # of lanes less alike the slower one hardly counts
PER_LAYER = tuple(item.name for item in dataclasses.fields(LayerTimes) if item.name != "step_us")
LEAST_US = 0.5  # no layer is expected to take less
RESTED_US = 1000.0  # a lane that had nothing to do for longer is slow at first; while it is in use it rests less
ASKING_US = 6.0  # from the lookup's beginning to the bell heard, and from the reply to the GPU, until it is measured


class Line:
    """y = x @ theta with theta >= 0, but for samples that are late: they are counted apart.

    theta: a lane's start, an expert, an expert of the other lane, and what else there is.
    """

    def __init__(self, theta: list[float]) -> None:
        self.theta: Floats = numpy.array(theta, numpy.float64)
        size = len(theta)
        self._gram: Floats = numpy.zeros((size, size))
        self._moment: Floats = numpy.zeros(size)
        self._lateness = Lateness()
        self._count = 0.0  # samples that count, older ones for less
        self._aged = 1.0  # what they count for by now

    @property
    def late(self) -> float:
        """How often, 0..1."""
        return self._lateness.often

    @property
    def late_us(self) -> float:
        """And by how much."""
        return self._lateness.us

    def add(self, x: Floats, y: Floats, keep: float, most_beside: float) -> None:
        """x float64 [N, D], y float64 [N]. keep: what older samples count for. most_beside: an expert of the other lane
        adds no more than so many of its own."""
        self._aged *= keep
        if not len(y):
            return
        keep, self._aged = self._aged, 1.0
        remembered = min(1.0, max(keep, REMEMBERED / (self._count + len(y))))
        self._forget(remembered)
        expected = numpy.maximum(x @ self.theta, LEAST_US)
        late = y > CLIP * expected
        self._lateness.add(y - expected, late, keep)
        if 3 * late.sum() <= len(y):  # few are: it is the others that tell what is usual
            x, y, expected = x[~late], y[~late], expected[~late]
        # First all of the line becomes slower or faster, then its parts: a few layers tell the one, but not the other.
        trust = len(y) / (len(y) + FEW)
        change = trust * _in_common(numpy.log(numpy.maximum(y, LEAST_US) / expected))
        if abs(change) > ANOTHER:
            self._forget(STALE**trust)
        self.theta = self.theta * math.exp(change)
        expected = expected * math.exp(change)
        y = numpy.minimum(y, CLIP * expected)
        least = LITTLE * y.mean() / numpy.maximum(x.mean(0), 1.0)
        x, y = x / expected[:, None], y / expected
        self._count += len(y)
        self._gram += x.T @ x
        self._moment += x.T @ y
        stay = RIDGE / numpy.maximum(self.theta, least) ** 2
        gram, moment = self._gram + numpy.diag(stay), self._moment + stay * self.theta
        self.theta = _not_negative(gram, moment)
        if self.theta[BESIDE] > most_beside * self.theta[EACH]:
            tied = numpy.eye(len(stay))
            tied[BESIDE, EACH] = most_beside
            tied = numpy.delete(tied, BESIDE, 1)
            self.theta = tied @ _not_negative(tied.T @ gram @ tied, tied.T @ moment)

    def _forget(self, keep: float) -> None:
        self._count *= keep
        self._gram *= keep
        self._moment *= keep


class Lateness:
    """How often something is late, and by how much. One time alone is chance.

    That it does not happen any more is believed as soon as so many were in time, one after the other, that chance would
    not explain it; time alone wipes nothing out, so a lane at rest is remembered for what it was.
    """

    def __init__(self) -> None:
        self._count = self._late = self._sum = 0.0
        self._in_time = 0  # since the last late one
        self._rate = 0.0  # as it was then

    @property
    def often(self) -> float:
        return max(0.0, self._late - 1.0) / self._count if self._count else 0.0

    @property
    def us(self) -> float:
        return self._sum / self._late if self._late else 0.0

    def add(self, us: Floats, late: numpy.typing.NDArray[numpy.bool_], keep: float) -> None:
        """us: how late, of each; late: which of them are, in order. Both [N]."""
        count = len(late)
        keep = min(1.0, max(keep, MEMORY / (self._count + count)))
        self._count = keep * self._count + count
        self._late = keep * self._late + int(late.sum())
        self._sum = keep * self._sum + float(us[late].sum())
        if late.any():
            self._in_time = count - 1 - int(numpy.flatnonzero(late)[-1])
            self._rate = self._late / self._count
        else:
            self._in_time += count
        if self._in_time * self._rate > BELIEVED:
            self._late = self._sum = self._rate = 0.0


def _in_common(changes: Floats) -> float:
    """What nearly all of them have in common: the smallest change but for the smallest SCATTERED, if they agree on the
    direction."""
    low, high = numpy.quantile(changes, (SCATTERED, 1 - SCATTERED))
    return max(0.0, float(low)) + min(0.0, float(high))


def _not_negative(gram: Floats, moment: Floats) -> Floats:
    """The least squares' solution, with what would be negative left out."""
    kept = numpy.ones(len(moment), bool)
    while kept.any():
        found = numpy.linalg.solve(gram[numpy.ix_(kept, kept)], moment[kept])
        if (found >= 0).all():
            solution = numpy.zeros(len(moment))
            solution[kept] = found
            return solution
        kept[numpy.flatnonzero(kept)[found.argmin()]] = False
    return numpy.zeros(len(moment))


class Level:
    """A number that is seen again and again: the mean over looks of each look's median."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self._sum = self._weight = 0.0

    def add(self, seen: Floats, keep: float) -> None:
        self._sum, self._weight = keep * self._sum, keep * self._weight
        if len(seen):
            self._sum += len(seen) * float(numpy.median(seen))
            self._weight += len(seen)
            self.value = self._sum / self._weight


@dataclass
class RowsSeen:
    """Steps of one number of rows."""

    misses: Floats  # how often so many experts were missing, [most + 1]; older ones count less
    waiting: Level = field(default_factory=Level)
    fetching: Level = field(default_factory=Level)
    _extra: float = 0.0
    _experts: float = 0.0

    def add(self, times: LayerTimes, keep: float) -> None:
        alone, own = times.fetched == 0, times.awaited == 0
        self.waiting.add(times.gpu[alone & own], keep)
        self.fetching.add((times.gpu - times.copy)[~alone & own], keep)
        self.misses = keep * self.misses + numpy.bincount(times.misses, minlength=len(self.misses))[: len(self.misses)]
        self._experts = keep * self._experts + float(times.on_cpu.sum())
        self._extra = keep * self._extra + float((times.routes - times.on_cpu).sum())

    @property
    def beside(self) -> Beside:
        fetching = self.fetching.value or self.waiting.value
        more = max(0.0, self._extra / self._experts) if self._experts > 0 else 0.0
        return Beside(max(0.0, self.waiting.value or fetching), max(0.0, fetching), more)


class CostLearner:
    """costs: what is believed at first. top_k: experts a row."""

    def __init__(self, costs: LaneCosts, top_k: int) -> None:
        self._link = Line([costs.a_link, costs.b_link, costs.link_beside])
        self._cpu = Line([costs.a_cpu, costs.b_cpu, costs.cpu_beside, costs.row])
        self._asking = Level(ASKING_US)
        self._link_each, self._cpu_each = Level(costs.link(1)), Level(costs.cpu(1))
        self._top_k = top_k
        self.rows: dict[int, RowsSeen] = {}

    @property
    def costs(self) -> LaneCosts:
        link, cpu = self._link, self._cpu
        (a_link, b_link, link_beside), (a_cpu, b_cpu, cpu_beside, row) = link.theta, cpu.theta
        a_link += link.late * link.late_us
        values = (a_link, b_link, a_cpu, b_cpu, link_beside, cpu_beside, self._pace, row, cpu.late, cpu.late_us)
        return LaneCosts(*map(float, values))

    @property
    def _pace(self) -> float:
        """By what an expert takes in all, which is steadier than the lines' slopes."""
        ratio = max(self._link_each.value, LEAST_US) / max(self._cpu_each.value, LEAST_US)
        return min(max(ratio, 1 / UNLIKE), UNLIKE)

    def beside(self, rows: int) -> Beside:
        """Of the nearest number of rows that was seen."""
        if not self.rows:
            return Beside()
        return self.rows[min(self.rows, key=lambda seen: (abs(seen - rows), seen))].beside

    def add(self, times: LayerTimes, seconds: float) -> None:
        """seconds: since the call before."""
        keep = 0.5 ** (seconds / HALF_LIFE)
        for rows in numpy.unique(times.rows).tolist():
            if rows not in self.rows:
                self.rows[rows] = RowsSeen(numpy.zeros(rows * self._top_k + 1))
        for rows, seen in self.rows.items():
            seen.add(_of(times, times.rows == rows), keep)
        fetched, on_cpu, pace = times.fetched, times.on_cpu, self._pace
        some = fetched > 0
        columns = _columns(numpy.ones_like(fetched), fetched, numpy.minimum(on_cpu, pace * fetched))
        self._link_each.add(times.copy[some] / fetched[some], keep)
        self._link.add(columns[some], times.copy[some], keep, SLOWED / pace)
        self._asking.add((times.done - times.served)[times.waited & ~numpy.isnan(times.served)], keep)
        # Where the GPU did not wait, the CPU was done before: what its lane says, and the way there and back.
        cpu = numpy.where(times.waited, times.done, numpy.minimum(times.served + self._asking.value, times.gpu))
        some = (on_cpu > 0) & ~numpy.isnan(cpu) & ~(times.idle > RESTED_US)
        self._cpu_each.add(cpu[some] / on_cpu[some], keep)
        columns = _columns(
            numpy.ones_like(on_cpu),
            on_cpu,
            numpy.minimum(fetched, on_cpu / pace),
            numpy.maximum(times.routes - on_cpu, 0),
        )
        self._cpu.add(columns[some], cpu[some], keep, SLOWED * pace)


def _columns(*columns: Ints | Floats) -> Floats:
    return numpy.stack(columns, 1).astype(numpy.float64)


def _of(times: LayerTimes, some: numpy.typing.NDArray[numpy.bool_]) -> LayerTimes:
    return dataclasses.replace(times, **{name: getattr(times, name)[some] for name in PER_LAYER})
