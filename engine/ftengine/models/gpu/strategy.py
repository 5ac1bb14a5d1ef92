"""Which strategy a decode step should take: by what fits into slots, and by what the two lanes were measured to cost.

Torch-free: what would be chosen is also asked for where there is neither torch nor Triton.

Only what is not in a slot differs between strategies, so only that is predicted: microseconds a token, at batch 1. Of a
layer's missing experts some are foretold and copied while the layer before is computed (kernels/triton/prefetch.py):
no lane has anything to do for those, and they take what their copies take beyond the time that hides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from ftengine.experts.split import LaneCosts

Strategy = Literal["resident", "offload", "cpu", "hybrid"]
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
# Microseconds more of a layer where nothing is left to the lanes and experts are copied ahead: the kernel that adds the
# CPU's answer waits for three streams, though nothing was asked, and other splits are tried now and then. Chosen so
# that `offload` is about as much faster as it was on H200s with a quarter of the experts in slots, 4.0 to 5.4 us a
# layer. Not of layers where something is left: with a tenth in slots copies would gain less than was measured
BESIDE = 3.7

PREFETCH = 8  # experts that are copied before their layer begins, at most
# Of a token's missing experts, those that the layer before names and that are copied in time: low, likely, high.
# Stated, until it is counted while serving. Of trained weights the next router, applied early, names 46 to 80 % of what
# is then routed, and not all of that is copied in time; of weights of which it names 98 %, 83 to 86 % were foretold
# with a quarter of the experts in slots, 61 % with a tenth. docs/fit.md tells more.
FORETOLD = (0.30, 0.60, 0.95)
# Microseconds of a decode step's layer on a GPU, however little it reads: what hides copies at the least, where nobody
# says how long the model's layers really take
LAYER = 31.0
# Of a copy's time, what is never hidden: it shares the link with missing experts and with wrong guesses, and host
# memory with the CPU. Chosen so that steps come out as they were measured with copies and without, see docs/fit.md
SHARED = 0.2


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
    """rests: steps of one sequence are expected to be faster while the CPU's lane is left alone, and begin so
    (experts/rest.py).
    """

    strategy: Strategy
    reason: str
    predicted: dict[Strategy, float]  # microseconds a token for experts without a slot
    rests: bool = False

    @property
    def alone(self) -> Strategy:
        """How steps of one sequence are computed at first: a `hybrid` that leaves the CPU alone does what `offload`
        does."""
        return "offload" if self.rests else self.strategy


def choose(asked: Asked, layers: int, experts: int, top_k: int, slots: int, lanes: Lanes | None) -> Choice:
    """layers, experts: MoE layers and experts of each; slots: experts that may stay on the GPU.

    lanes: None where they were not measured. `auto` never takes `offload`: a `hybrid` that rests is as fast, and uses
    both lanes where more sequences miss more, or where the costs change.
    """
    fits = slots >= layers * experts
    share = slots / max(1, layers * experts)
    foretold = FORETOLD if slots else (0.0, 0.0, 0.0)
    predicted = {} if lanes is None else _predict(layers, top_k, hit_rate(share), foretold[1], lanes)
    if asked != "auto":
        rests = asked == "hybrid" and bool(slots and predicted) and predicted["offload"] < predicted["hybrid"]
        return Choice(asked, "asked for", predicted, rests)
    if fits:
        return Choice("resident", f"all {layers * experts} experts have a slot", {**predicted, "resident": 0.0})
    if lanes is None:
        return Choice("hybrid", "the costs of link and CPU were not measured", predicted)
    cases = [_predict(layers, top_k, hits, named, lanes) for hits in hit_range(share) for named in foretold]
    best = _least_regret(cases, layers * LAYER)
    rests = best == "offload"
    figures = ", ".join(f"{name} {cost / 1e3:.2f} ms" for name, cost in sorted(predicted.items(), key=lambda x: x[1]))
    known = f"{hit_rate(share):.0%} hits, {foretold[1]:.0%} of the others foretold"
    reason = f"predicted a token for experts without a slot, at {known}: {figures}"
    if rests:
        reason = f"one sequence over the link alone, until steps show something else; {reason}"
    return Choice("hybrid" if rests else best, reason, predicted, rests)


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


@dataclass(frozen=True)
class Missing:
    """Of a layer's experts without a slot at batch 1, as expected. left: microseconds of the lanes for those that no
    copy was made of; late: of the copies of foretold ones, as far as nothing hides them. copied: how many those are.
    """

    left: float
    late: float
    copied: float

    @property
    def us(self) -> float:
        return self.left + self.late


def missing_experts(
    strategy: Strategy, top_k: int, missing: float, lanes: Lanes, foretold: float = 0.0, hidden: float = LAYER
) -> Missing:
    """missing: share of a token's experts, foretold: share of those, 0 where nothing is copied ahead; each expert
    independently of the others. hidden: microseconds that the layer takes beside its missing experts, while the link
    would rest.

    Of the foretold ones, as many are reckoned as copied as make the layer fastest: the engine copies fewer while the
    link is behind, and over a slow link beside a CPU none would pay.
    """
    if strategy == "resident":
        return Missing(0.0, 0.0, 0.0)
    if strategy == "cpu":  # it has no slots: nothing is ever found, or copied into one
        return Missing(max(lanes.handshake, lanes.alone.cpu(top_k)), 0.0, 0.0)
    idle = UNHIDDEN * lanes.handshake + (BESIDE if foretold else 0.0)
    layer = cache(_offload(lanes, hidden) if strategy == "offload" else _hybrid(lanes, hidden, idle))
    left = late = copied = 0.0
    for misses in range(top_k + 1):
        for named in range(misses + 1):
            chance = _chance(misses, top_k, missing) * _chance(named, misses, foretold)
            ahead = min(range(min(named, PREFETCH) + 1), key=lambda n: sum(layer(misses - n, n)))
            of_lanes, of_copies = layer(misses - ahead, ahead)
            left, late, copied = left + chance * of_lanes, late + chance * of_copies, copied + chance * ahead
    return Missing(left, late, copied)


# How long the lanes take for experts that are left to them, and copies of others beyond what hides them: microseconds
Layer = Callable[[int, int], tuple[float, float]]


def _offload(lanes: Lanes, hidden: float) -> Layer:
    return lambda left, copied: (lanes.alone.link(left), _late(lanes.alone.b_link * copied, hidden))


def _hybrid(lanes: Lanes, hidden: float, idle: float) -> Layer:
    """By the faster one of two: both lanes take what is left, or the CPU does and the link copies meanwhile, too. idle:
    what the lanes take where nothing is left to them.
    """
    alone, together = lanes.alone, lanes.together

    def on_lanes(left: int, us: float) -> float:
        return max(lanes.handshake, ADMISSION * us) if left else idle

    def layer(left: int, copied: int) -> tuple[float, float]:
        copying, on_cpu = together.b_link * copied, alone.cpu(left)
        split = on_lanes(left, min(alone.link(left), on_cpu, together.layer(left, together.link_share(left))))
        whole = on_lanes(left, on_cpu)
        return min((split, _late(copying, hidden)), (whole, _late(copying, hidden + whole)), key=sum)

    return layer


def _late(copying: float, hidden: float) -> float:
    return SHARED * copying + max(0.0, copying - hidden)


def _chance(some: int, count: int, share: float) -> float:
    """That so many of `count` are of `share`, each independently."""
    return math.comb(count, some) * share**some * (1.0 - share) ** (count - some)


def _least_regret(cases: Sequence[dict[Strategy, float]], others: float) -> Strategy:
    """Which loses the least part of a step to the best one, wherever between their ends hits and foresight are: of two
    that are as fast at the likely shares, one may be far slower at others. others: microseconds of a step besides.
    """

    def loss(strategy: Strategy) -> float:
        return max((others + case[strategy]) / (others + min(case.values())) for case in cases)

    return min(cases[0], key=loss)


def _predict(layers: int, top_k: int, hits: float, foretold: float, lanes: Lanes) -> dict[Strategy, float]:
    strategies: tuple[Strategy, ...] = ("offload", "cpu", "hybrid")
    return {each: layers * missing_experts(each, top_k, 1.0 - hits, lanes, foretold).us for each in strategies}
