"""What a layer's experts without a slot take, by strategy, from both lanes' measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable

from ftengine.models.gpu.strategy import Lanes


def missing_us(strategy: str, top_k: int, missing: float, lanes: Lanes) -> float:
    """Microseconds a layer at batch 1; missing: share of a token's experts, each missing independently."""
    if strategy == "resident":
        return 0.0
    if strategy == "cpu":  # it has no slots: nothing is ever found
        return max(lanes.handshake, lanes.alone.cpu(top_k))
    return _mean(lanes.alone.link if strategy == "offload" else _hybrid(lanes), top_k, missing)


def _hybrid(lanes: Lanes) -> Callable[[int], float]:
    """The GPU waits for the CPU's answer in every layer, even if nothing is missing; costs hold that wait already."""
    alone, together = lanes.alone, lanes.together

    def cost(misses: int) -> float:
        both = together.layer(misses, together.link_share(misses))
        return max(lanes.handshake, min(alone.link(misses), alone.cpu(misses), both))

    return cost


def _mean(cost: Callable[[int], float], top_k: int, missing: float) -> float:
    """Over the binomial number of a layer's misses."""
    return sum(
        math.comb(top_k, misses) * missing**misses * (1 - missing) ** (top_k - misses) * cost(misses)
        for misses in range(top_k + 1)
    )
