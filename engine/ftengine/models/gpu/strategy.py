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

# Share of routed experts found in a slot, by the share of all experts that have one: replay of traces in which 28 % of
# a token's experts are used again by the next one. What a model really does is counted while it serves.
HIT_CURVE = ((0.0, 0.0), (0.05, 0.42), (0.10, 0.60), (0.25, 0.80), (0.37, 0.86), (0.50, 0.90), (1.0, 1.0))


@dataclass(frozen=True)
class Lanes:
    """alone: each lane while the other one rests; together: while both work; microseconds.

    handshake: what a layer pays for the CPU's lane even where nothing is missing.
    """

    alone: LaneCosts
    together: LaneCosts
    handshake: float


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
    predicted = {} if lanes is None else _predict(layers, top_k, slots / max(1, layers * experts), lanes)
    if asked != "auto":
        return Choice(asked, "asked for", predicted)
    if fits:
        return Choice("resident", f"all {layers * experts} experts have a slot", {**predicted, "resident": 0.0})
    if not predicted:
        return Choice("hybrid", "the costs of link and CPU were not measured", predicted)
    best = min(predicted, key=lambda strategy: predicted[strategy])
    figures = ", ".join(f"{name} {cost / 1e3:.2f} ms" for name, cost in sorted(predicted.items(), key=lambda x: x[1]))
    hit = hit_rate(slots / (layers * experts))
    reason = f"predicted a token for experts without a slot, at {hit:.0%} hits: {figures}"
    return Choice(best, reason, predicted)


def hit_rate(share: float) -> float:
    """Expected hits for `share` of all experts in slots, between the points of HIT_CURVE."""
    for (left, low), (right, high) in pairwise(HIT_CURVE):
        if share <= right:
            return low + (high - low) * (share - left) / (right - left)
    return 1.0


def _predict(layers: int, top_k: int, share: float, lanes: Lanes) -> dict[Strategy, float]:
    missing, alone, together = 1.0 - hit_rate(share), lanes.alone, lanes.together

    def hybrid(misses: int) -> float:
        both = together.layer(misses, together.link_share(misses))
        return lanes.handshake + min(alone.link(misses), alone.cpu(misses), both)

    return {
        "offload": layers * _expected(alone.link, top_k, missing),
        "cpu": layers * (lanes.handshake + alone.cpu(top_k)),  # it has no slots: nothing is ever found
        "hybrid": layers * _expected(hybrid, top_k, missing),
    }


def _expected(cost: Callable[[int], float], top_k: int, missing: float) -> float:
    """Over the number of a layer's misses, each expert missing independently."""
    return sum(
        math.comb(top_k, misses) * missing**misses * (1 - missing) ** (top_k - misses) * cost(misses)
        for misses in range(top_k + 1)
    )
