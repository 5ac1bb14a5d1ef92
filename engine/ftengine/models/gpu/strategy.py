"""Which strategy a decode step should take: by what fits into slots, and by what the two lanes were measured to cost.

Only what is not in a slot differs between strategies, so only that is predicted: microseconds a token, at batch 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from ftengine.experts.split import LaneCosts

if TYPE_CHECKING:  # it imports torch, and what would be chosen is also asked for where there is none
    from ftengine.models.gpu.setup import Strategy

Asked = Literal["auto", "resident", "offload", "cpu", "hybrid"]

# Share of all experts that have a slot; then the share of a token's routed experts that is found there: low, likely,
# high. Stated, until it is counted while serving. The likely ones at 10 and 25 % were counted by servers of weights
# whose routing has the locality that docs/performance.md tells of, the ends are about what other engines counted; the
# other points follow replayed traces of that kind (experts/replay.py). No model has to obey them.
HIT_CURVE = (
    (0.00, 0.00, 0.00, 0.00),
    (0.05, 0.40, 0.46, 0.58),
    (0.10, 0.57, 0.66, 0.77),
    (0.25, 0.79, 0.85, 0.90),
    (0.50, 0.88, 0.93, 0.96),
    (1.00, 1.00, 1.00, 1.00),
)
# Of `hybrid`, by the servers of docs/performance.md: what of the way to the CPU's lane and back is not hidden behind
# the experts in slots where nothing is missing (a step took 0.16 ms more than `resident` did); and how much longer
# missing experts take while others are copied into slots in the background
UNHIDDEN, ADMISSION = 0.22, 1.1


@dataclass(frozen=True)
class Lanes:
    """alone: each lane while the other one rests; together: while both work; microseconds.

    handshake: the way to the CPU's lane and back; the CPU's costs hold it already. rough: they follow from bandwidths,
    no expert of the model was computed.
    """

    alone: LaneCosts
    together: LaneCosts
    handshake: float
    rough: bool = False


@dataclass(frozen=True)
class Choice:
    strategy: Strategy
    reason: str
    predicted: dict[Strategy, float]  # microseconds a token for experts without a slot


def choose(asked: Asked, layers: int, experts: int, top_k: int, slots: int, lanes: Lanes | None) -> Choice:
    """layers, experts: MoE layers and experts of each; slots: experts that may stay on the GPU.

    lanes: None where they were not measured.
    """
    fits = slots >= layers * experts
    share = slots / max(1, layers * experts)
    predicted = {} if lanes is None else _predict(layers, top_k, hit_rate(share), lanes)
    if asked != "auto":
        return Choice(asked, "asked for", predicted)
    if fits:
        return Choice("resident", f"all {layers * experts} experts have a slot", {**predicted, "resident": 0.0})
    if lanes is None:
        return Choice("hybrid", "the costs of link and CPU were not measured", predicted)
    best = _least_regret(layers, top_k, share, lanes)
    figures = ", ".join(f"{name} {cost / 1e3:.2f} ms" for name, cost in sorted(predicted.items(), key=lambda x: x[1]))
    reason = f"predicted a token for experts without a slot, at {hit_rate(share):.0%} hits: {figures}"
    return Choice(best, reason, predicted)


def hit_range(share: float) -> tuple[float, float, float]:
    """Expected hits for `share` of all experts in slots, between the points of HIT_CURVE: low, likely, high."""
    for left, right in pairwise(HIT_CURVE):
        if share <= right[0]:
            part = (share - left[0]) / (right[0] - left[0])
            low, likely, high = (a + (b - a) * part for a, b in zip(left[1:], right[1:], strict=True))
            return low, likely, high
    return 1.0, 1.0, 1.0


def hit_rate(share: float) -> float:
    """The likely one."""
    return hit_range(share)[1]


def missing_us(strategy: Strategy, top_k: int, missing: float, lanes: Lanes) -> float:
    """Microseconds of a layer's experts without a slot at batch 1; missing: share of a token's experts, each missing
    independently of the others.
    """
    if strategy == "resident":
        return 0.0
    if strategy == "cpu":  # it has no slots: nothing is ever found
        return max(lanes.handshake, lanes.alone.cpu(top_k))
    return _expected(lanes.alone.link if strategy == "offload" else _hybrid(lanes), top_k, missing)


def _hybrid(lanes: Lanes) -> Callable[[int], float]:
    alone, together = lanes.alone, lanes.together

    def cost(misses: int) -> float:
        if not misses:
            return UNHIDDEN * lanes.handshake
        both = together.layer(misses, together.link_share(misses))
        return max(lanes.handshake, ADMISSION * min(alone.link(misses), alone.cpu(misses), both))

    return cost


def _least_regret(layers: int, top_k: int, share: float, lanes: Lanes) -> Strategy:
    """Which loses least to the best one, wherever between the curve's ends the hits are: of two that are as fast at the
    likely rate, one may be far slower at another.
    """
    cases = [_predict(layers, top_k, hits, lanes) for hits in hit_range(share)]
    return min(cases[0], key=lambda strategy: max(case[strategy] - min(case.values()) for case in cases))


def _predict(layers: int, top_k: int, hits: float, lanes: Lanes) -> dict[Strategy, float]:
    strategies: tuple[Strategy, ...] = ("offload", "cpu", "hybrid")
    return {strategy: layers * missing_us(strategy, top_k, 1.0 - hits, lanes) for strategy in strategies}


def _expected(cost: Callable[[int], float], top_k: int, missing: float) -> float:
    """Over the number of a layer's misses, each expert missing independently."""
    return sum(
        math.comb(top_k, misses) * missing**misses * (1 - missing) ** (top_k - misses) * cost(misses)
        for misses in range(top_k + 1)
    )
