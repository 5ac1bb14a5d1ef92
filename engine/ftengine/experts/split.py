"""How a layer's missing experts are divided between the link and the CPU, which work at the same time.

`LaneCosts.link_share` is what the kernels do (kernels/triton/split.py): the least maximum of both lanes' measured
times a + b * n. `published_share` is the rule this grew from: q* = m * B_P / B_H of m missing experts cross the link,
B_P the link's and B_H the host memory's bandwidth, which the CPU and the link share; rounded. It knows no fixed costs,
and at small m it may send nothing over the link, step after step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LaneCosts:
    """Microseconds for n experts of a layer: a + b * n where n > 0, else 0."""

    a_link: float
    b_link: float
    a_cpu: float
    b_cpu: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}, not a time")

    def link(self, experts: int) -> float:
        return self.a_link + self.b_link * experts if experts else 0.0

    def cpu(self, experts: int) -> float:
        return self.a_cpu + self.b_cpu * experts if experts else 0.0

    def layer(self, misses: int, fetched: int) -> float:
        """Time of a layer that fetches `fetched` of its missing experts and computes the others on the CPU."""
        return max(self.link(fetched), self.cpu(misses - fetched))

    def link_share(self, misses: int) -> int:
        """How many to fetch; of equally fast splits the one that fetches most, because a filled slot lasts."""
        return min(range(misses, -1, -1), key=lambda fetched: self.layer(misses, fetched))


def forced_share(misses: int, cpu: float) -> int:
    """How many to fetch where a fixed share `cpu`, 0..1, goes to the CPU."""
    return min(max(misses - math.floor(cpu * misses + 0.5), 0), misses)


def published_share(misses: int, link_bandwidth: float, host_bandwidth: float) -> int:
    """round(q*), q* = misses * B_P / B_H, at most `misses`. Bandwidths in one unit."""
    return min(misses, math.floor(misses * link_bandwidth / host_bandwidth + 0.5))
