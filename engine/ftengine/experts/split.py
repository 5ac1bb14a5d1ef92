"""How a layer's missing experts are divided between the link and the CPU, which work at the same time.

`LaneCosts.link_share` is the rule: of all splits the one with the least maximum of both lanes' measured times.
`split_table` is what kernels look it up in (kernels/triton/split.py). The rule this grew from, which `ft bench bw`
shows beside it (profile.py): q* = m * B_P / B_H of m missing experts cross the link, B_P the link's and B_H the host
memory's bandwidth, which the CPU and the link share; rounded. It knows no fixed costs, and at small m it may send
nothing over the link, step after step.

numpy is imported where tables are made: predictions are told also where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import numpy.typing

TABLES = 5  # of the split: the one in use, and four that are tried now and then


@dataclass(frozen=True)
class Beside:
    """What a layer of a step brings besides missing experts: microseconds, from the bell on, that the GPU is busy with
    it anyway, where nothing is fetched and where something is; and for an expert on the CPU the rows that use it, but
    for the first."""

    waiting: float = 0.0
    fetching: float = 0.0
    more_rows: float = 0.0


NOTHING = Beside()


@dataclass(frozen=True)
class LaneCosts:
    """Microseconds for n experts of a layer: a + b * n where n > 0, else 0.

    Both lanes read one memory: link_beside and cpu_beside are what an expert of the other lane adds to a lane's time,
    as far as both are at work; pace: experts that the CPU computes while one crosses the link. row: of the CPU, for
    each row that uses an expert, but for the first. late: how often, 0..1, the CPU is late_us late, whatever it
    computes: another program has one of its cores.
    """

    a_link: float
    b_link: float
    a_cpu: float
    b_cpu: float
    link_beside: float = 0.0
    cpu_beside: float = 0.0
    pace: float = 1.0
    row: float = 0.0
    late: float = 0.0
    late_us: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}, not a time")
        if not self.pace:
            raise ValueError("pace is 0: nothing could be told of the lanes side by side")

    def link(self, experts: int, on_cpu: int = 0) -> float:
        if not experts:
            return 0.0
        return self.a_link + self.b_link * experts + self.link_beside * min(on_cpu, self.pace * experts)

    def cpu(self, experts: int, fetched: int = 0, more_rows: float = 0.0) -> float:
        if not experts:
            return 0.0
        more = self.row * more_rows * experts + self.cpu_beside * min(fetched, experts / self.pace)
        return self.a_cpu + self.b_cpu * experts + more

    def layer(self, misses: int, fetched: int, beside: Beside = NOTHING) -> float:
        """Time of a layer that fetches `fetched` of its missing experts and computes the others on the CPU."""
        left = misses - fetched
        link = beside.fetching + self.link(fetched, left) if fetched else beside.waiting
        if not left:
            return link
        cpu = self.cpu(left, fetched, beside.more_rows)
        return (1 - self.late) * max(link, cpu) + self.late * max(link, cpu + self.late_us)

    def link_share(self, misses: int, beside: Beside = NOTHING) -> int:
        """How many to fetch; of equally fast splits the one that fetches most, because a filled slot lasts."""
        return min(range(misses, -1, -1), key=lambda fetched: self.layer(misses, fetched, beside))

    def layers(self, most: int, beside: Beside = NOTHING) -> numpy.typing.NDArray[numpy.float64]:
        """`layer` of [misses, fetched], float64 [most + 1, most + 1]; infinite where more are fetched than missing."""
        import numpy

        misses, fetched = numpy.indices((most + 1, most + 1))
        left = misses - fetched
        link = self.a_link + self.b_link * fetched + self.link_beside * numpy.minimum(left, self.pace * fetched)
        link = beside.fetching + link
        more = self.row * beside.more_rows * left + self.cpu_beside * numpy.minimum(fetched, left / self.pace)
        cpu = self.a_cpu + self.b_cpu * left + more
        link = numpy.where(fetched > 0, link, beside.waiting)
        both = (1 - self.late) * numpy.maximum(link, cpu) + self.late * numpy.maximum(link, cpu + self.late_us)
        return numpy.where(left > 0, both, numpy.where(left < 0, numpy.inf, link))


def fastest(times: numpy.typing.NDArray[numpy.float64]) -> numpy.typing.NDArray[numpy.int64]:
    """Of `LaneCosts.layers`: how many to fetch of 0, 1, ... missing experts, as `link_share` says."""
    found: numpy.typing.NDArray[numpy.int64] = times.shape[1] - 1 - times[:, ::-1].argmin(1)
    return found


def split_table(rows: int, top_k: int, share: Callable[[int, int], int]) -> numpy.typing.NDArray[numpy.int16]:
    """int16 [TABLES, rows, rows * top_k + 1] for steps of 1..rows rows; share: rows, misses -> how many to fetch."""
    import numpy

    table = numpy.zeros((TABLES, rows, rows * top_k + 1), numpy.int16)
    for count in range(1, rows + 1):
        most = count * top_k
        table[:, count - 1, : most + 1] = [share(count, misses) for misses in range(most + 1)]
    return table


def table_by_costs(costs: LaneCosts, rows: int, top_k: int) -> numpy.typing.NDArray[numpy.int16]:
    """`split_table` with the fastest splits."""
    found = fastest(costs.layers(rows * top_k)).tolist()
    return split_table(rows, top_k, lambda rows, misses: int(found[misses]))


def forced_share(misses: int, cpu: float) -> int:
    """How many to fetch where a fixed share `cpu`, 0..1, goes to the CPU."""
    return min(max(misses - math.floor(cpu * misses + 0.5), 0), misses)
