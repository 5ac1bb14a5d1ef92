"""A machine whose lanes cost what it says, in float64: layers of decode steps under any split, as the device records
them. Two streams of experts share one memory's bandwidth; what one leaves when it is done, the other takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from ftengine.experts.split import forced_share
from ftengine.kernels.triton import cache_state as at
from ftengine.kernels.triton.split import TRIALS, TRIED

NOISE = 0.08  # of a lane's time, logarithmic
HICCUP_US, HICCUPS = 5000.0, 1.0  # of either lane, and how many a second
REST_US = 45.0  # attention and all else of a layer
RIGHT, RESTS = 0.8, 1 / 64  # of what is prefetched, and how often nothing is
MORE_ROWS = 0.1  # further rows of an expert on the CPU, for each further row of the step
MAILBOX_US = 5.0  # of the CPU's time, that its lane does not see


@dataclass(frozen=True)
class Machine:
    """Times in us, rates in experts a us. late: how often a request to the CPU waits `late_us` for its cores."""

    link_start: float = 3.0
    cpu_start: float = 7.0
    link_rate: float = 1 / 37
    cpu_rate: float = 1 / 22
    memory: float = 1 / 37 + 1 / 34
    gpu: float = 12.0
    row: float = 0.0  # of the CPU, for each further row of an expert
    late: float = 0.0
    late_us: float = 0.0

    def lanes(self, link: float, cpu: float) -> tuple[float, float]:
        """When each lane is done with so many experts."""
        start_link, start_cpu = (self.link_start if link else 0.0), (self.cpu_start if cpu else 0.0)
        slow = min(1.0, self.memory / (self.link_rate + self.cpu_rate))
        together = min(link / (slow * self.link_rate), cpu / (slow * self.cpu_rate))
        link -= together * slow * self.link_rate
        cpu -= together * slow * self.cpu_rate
        return (
            start_link + together + link / min(self.link_rate, self.memory),
            start_cpu + together + cpu / min(self.cpu_rate, self.memory),
        )

    def layer(self, misses: int, fetched: int, rows: int = 1) -> float:
        """Expected time of a layer."""
        link, cpu = self.lanes(fetched, misses - fetched)
        link += self.gpu
        if misses == fetched:
            return link
        cpu += self.row * MORE_ROWS * (rows - 1) * (misses - fetched)
        return (1 - self.late) * max(link, cpu) + self.late * max(link, cpu + self.late_us)


class Simulation:
    """Layers of steps on a machine that may change. misses: how probable 0, 1, 2, ... missing experts are."""

    def __init__(self, machine: Machine, misses: numpy.ndarray, rows: int = 1, layers: int = 40, seed: int = 0) -> None:
        self.machine, self.misses, self.rows, self.layers = machine, misses / misses.sum(), rows, layers
        self.generator = numpy.random.default_rng(seed)
        self.step = self.request = 0
        self.now = 0.0

    def expected(self, fetched: Sequence[int]) -> float:
        """Microseconds of a layer that fetches fetched[m] of m missing experts."""
        return sum(p * self.machine.layer(m, int(fetched[m]), self.rows) for m, p in enumerate(self.misses))

    def best_share(self) -> float:
        """The best of fixed shares, 0 and 1 among them."""
        return min(self._of_share(share) for share in numpy.linspace(0, 1, 21))

    def best_lane(self) -> float:
        return min(self._of_share(share) for share in (0, 1))

    def _of_share(self, share: float) -> float:
        return self.expected([forced_share(m, share) for m in range(len(self.misses))])

    def run(
        self, table: numpy.ndarray, tries: int, steps: int, prefetched: int = 0
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Returns the device's record and the CPU lane's log. prefetched: experts a layer, of which RIGHT are used; all
        of them are waited for, as far as the rest of a layer does not hide them."""
        shape = steps, self.layers
        random = self.generator
        misses = random.choice(len(self.misses), shape, p=self.misses)
        listed = numpy.minimum(misses, prefetched) * (random.random(shape) > RESTS)
        right = random.binomial(listed, RIGHT)
        misses = misses - right
        turn = (self.step + numpy.arange(steps)[:, None]) % at.PERIOD.value * self.layers + numpy.arange(self.layers)
        which = numpy.zeros(shape, int)
        if tries:
            which = numpy.where(turn % tries < TRIED.value, 1 + turn // tries % TRIALS.value, 0)
        fetched = table[which, self.rows - 1, misses].astype(int)
        on_cpu = misses - fetched
        more = random.poisson(MORE_ROWS * (self.rows - 1) * on_cpu)
        most = len(self.misses)
        lanes = numpy.array([[self.machine.lanes(f, max(0, m - f)) for f in range(most)] for m in range(most)])
        link, cpu = numpy.moveaxis(lanes[misses, fetched], -1, 0) * random.lognormal(0, NOISE, (2, *shape))
        cpu += self.machine.row * more + self.machine.late_us * (random.random(shape) < self.machine.late)
        often = HICCUPS * 1e-6 * (link.mean() + REST_US)
        link += HICCUP_US * (random.random(shape) < often / 2)
        cpu += HICCUP_US * (random.random(shape) < often / 2)
        own = link + self.machine.gpu
        gpu = numpy.where(right > 0, numpy.maximum(own, listed / self.machine.link_rate - REST_US), own)
        done = numpy.where(on_cpu > 0, numpy.maximum(gpu, cpu), gpu)
        asked = numpy.where(on_cpu > 0, self.request + numpy.cumsum(on_cpu.ravel() > 0).reshape(shape), 0)
        begun = int(self.now * 1e9) + numpy.cumsum((done + REST_US).ravel() * 1e3).astype(numpy.int64).reshape(shape)
        lines = numpy.zeros((*shape, at.RECORD.value), numpy.int64)
        lines[..., at.WHAT.value] = self.rows | misses << 8 | fetched << 16
        lines[..., at.ASKED.value] = asked
        for column, us in ((at.COPY, link), (at.GPU_DONE, gpu), (at.DONE, done)):
            lines[..., column.value] = 1e3 * us
        lines[..., at.AWAITED.value] = right
        lines[..., at.AT_STEP.value] = self.step + 1 + numpy.arange(steps)[:, None]
        lines[..., at.AT_TIME.value] = begun
        record = numpy.zeros((at.RECORDED.value, self.layers, at.RECORD.value), numpy.int32)
        record[(self.step + numpy.arange(steps)) % len(record)] = lines.astype(numpy.uint32).view(numpy.int32)
        served = (1e3 * numpy.maximum(cpu - MAILBOX_US, 0)).astype(int)
        some = on_cpu > 0
        log = numpy.stack([asked, on_cpu, on_cpu + more, served, numpy.full(shape, 60_000)], -1)[some]
        self.step += steps
        self.request = int(asked.max(initial=self.request))
        self.now = int(begun[-1, -1]) / 1e9
        return record, log.astype(numpy.int64)
