"""What the GPU's cache of experts and its two lanes did: for /v1/stats and the log, and what of it is of no use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ftengine.experts.counts import LayerCounts as Counts
    from ftengine.experts.online import OnlineSplit
    from ftengine.experts.rest import LaneRest
    from ftengine.experts.slots import SlotPool

ENOUGH_STEPS = 256  # decode steps after which a feature that did nothing is told of
WINDOW_STEPS = 4 * ENOUGH_STEPS  # that prefetching is judged by: one text may be hard to foretell
LEAST_USED = 0.25  # of what was prefetched; below, it is told of
LEAST_SHARE = 0.01  # of the time that a lane was busy; below, it is left out


class LaneCost(msgspec.Struct):
    """What n experts of one layer take, as the split reckons: fixed_us + each_us * n, in microseconds."""

    fixed_us: float
    each_us: float


class SplitStats(msgspec.Struct):
    """Of the split of misses that follows the lanes' costs while they change."""

    moves: int  # since start
    since_s: float  # how long it has been as it is


class RestStats(msgspec.Struct):
    """Of `hybrid` whose steps may leave the CPU's lane alone."""

    steps: int  # that did, since start
    moves: int  # how often it was changed, for some number of sequences
    alone: bool  # whether steps of one sequence do so now


class LayerCounts(msgspec.Struct):
    """Of one MoE layer or of all, since start. Experts count once a step, however many rows use them."""

    hits: int  # found in slots, in decode steps; the foretold ones, too
    misses: int  # not found: fetched or computed on the CPU
    hit_rate: float  # 0..1, the cache's own: a foretold expert had to cross the link; 1 where nothing was looked up
    fetched: int  # over the link, and computed on the GPU
    kept: int  # of the fetched, in a slot
    cpu_experts: int
    cpu_routes: int  # pairs of a row and an expert
    admitted: int  # computed on the CPU, and copied into a slot in the background
    staged: int  # over the link in steps with prefill
    seeded: int  # of the staged, kept in a slot
    prefetched: int  # over the link before their layer began
    foretold: int  # of the prefetched, used by that layer
    link_bytes: int  # fetched, admitted, staged and prefetched
    link_ms: float  # that the copies over the link took, but for the prefetched; the admitted's run beside others
    cpu_bytes: int
    cpu_ms: float  # that the CPU's lane computed
    cpu_wait_ms: float  # that the GPU waited for the CPU


class ExpertStats(msgspec.Struct):
    resident: bool  # every expert has a slot: nothing is looked up, so nothing is counted
    slots: int
    pool: int  # routed experts of the model
    layer_count: int
    decode_steps: int
    total: LayerCounts
    cpu_ms: float  # `total`'s
    link_ms: float  # `total`'s
    link_cost: LaneCost
    cpu_cost: LaneCost
    cpu_share: float | None  # of the misses, where it is fixed; None: by the lanes' costs
    background: float  # experts a layer and step that may be admitted in the background; 0: none
    prefetch: int  # experts a layer and step that may be prefetched now; 0: none
    layers: list[LayerCounts] | None = None  # where they were asked for
    split: SplitStats | None = None  # None: it stays what it was at the start
    rest: RestStats | None = None  # None: every step may ask the CPU, or none may


def expert_stats(model: Any, *, layers: bool = False) -> ExpertStats | None:
    """None for a model without such a cache. Waits for what the device is doing."""
    experts = getattr(model, "experts", None)
    pool = getattr(experts, "pool", None)
    if experts is None or pool is None:
        return None
    found, costs = pool.stats(), pool.costs
    lane = experts.lane
    seconds = (0.0,) * pool.layers if lane is None else lane.counts().layer_seconds
    total = _counts(found.total, sum(seconds))
    return ExpertStats(
        resident=pool.tensors.resident,
        slots=pool.tensors.slots,
        pool=pool.layers * pool.experts,
        layer_count=pool.layers,
        decode_steps=found.total.steps // pool.layers,
        total=total,
        cpu_ms=total.cpu_ms,
        link_ms=total.link_ms,
        link_cost=LaneCost(round(costs.a_link, 3), round(costs.b_link, 3)),
        cpu_cost=LaneCost(round(costs.a_cpu, 3), round(costs.b_cpu, 3)),
        cpu_share=pool.cpu_share,
        background=0.0 if lane is None else pool.background,
        prefetch=pool.prefetch if _can_prefetch(pool) else 0,
        layers=[_counts(*each) for each in zip(found.layers, seconds, strict=True)] if layers else None,
        split=_split(getattr(experts, "split", None)),
        rest=_rest(getattr(experts, "rest", None)),
    )


def _can_prefetch(pool: SlotPool) -> bool:
    """Copies need slots, memory that the GPU can read, and a layer before."""
    tensors = pool.tensors
    return tensors.readable and not tensors.resident and tensors.slots > 0 and pool.layers > 1


def _split(found: OnlineSplit | None) -> SplitStats | None:
    return None if found is None else SplitStats(found.moves.count, round(found.unmoved, 1))


def _rest(found: LaneRest | None) -> RestStats | None:
    return None if found is None else RestStats(found.rested, found.moves, found.rests(1))


def _counts(found: Counts, cpu_seconds: float) -> LayerCounts:
    """cpu_seconds: of the CPU's lane, which knows nothing of the device's counters."""
    return LayerCounts(
        hits=found.hits,
        misses=found.misses,
        hit_rate=round(found.hit_rate, 4),
        fetched=found.fetched,
        kept=found.kept,
        cpu_experts=found.cpu_experts,
        cpu_routes=found.cpu_routes,
        admitted=found.admitted,
        staged=found.staged,
        seeded=found.seeded,
        prefetched=found.prefetched,
        foretold=found.foretold,
        link_bytes=found.link_bytes,
        link_ms=round(found.copied_ns / 1e6, 3),
        cpu_bytes=found.cpu_bytes,
        cpu_ms=round(1e3 * cpu_seconds, 3),
        cpu_wait_ms=round(found.waited_ns / 1e6, 3),
    )


def describe(now: LayerCounts, before: LayerCounts | None, seconds: float) -> str:
    """What happened since `before`, `seconds` of work ago, for the log: what did not is left out."""
    since = _Since(now, before)
    parts = []
    if looked_up := since("hits") + since("misses"):
        parts.append(f"experts {(since('hits') - since('foretold')) / looked_up:.1%} in slots")
    if fetched := since("fetched"):
        parts.append(f"{fetched} fetched")
    if computed := since("cpu_experts"):
        parts.append(f"{computed} on the CPU ({since('cpu_routes')} routes)")
    if admitted := since("admitted"):
        parts.append(f"{admitted} admitted")
    prefetched = since("prefetched")
    if prefetched:
        parts.append(f"{prefetched} prefetched ({since('foretold') / prefetched:.0%} used)")
    if size := since("link_bytes"):
        untimed = " without the prefetched" if prefetched else ""  # whose bytes are counted
        parts.append(_speed("link", size, since("link_ms"), seconds, untimed))
    if size := since("cpu_bytes"):
        parts.append(_speed("CPU", size, since("cpu_ms"), seconds))
    return ", ".join(parts)


def _speed(lane: str, size: int, busy_ms: int, seconds: float, untimed: str = "") -> str:
    """size: bytes in `seconds`, of which the lane was busy for `busy_ms`; untimed: what these leave out."""
    text = f"{lane} {size / seconds / 1e9:.2f} GB/s"
    share = min(1.0, busy_ms / 1e3 / seconds)  # copies in the background run beside others, and both count
    return f"{text} ({share:.0%} of the time{untimed})" if share >= LEAST_SHARE else text


class _Since:
    """A counter's growth from `before`, or from the start, until `now`."""

    def __init__(self, now: LayerCounts, before: LayerCounts | None) -> None:
        self._now, self._before = now, before

    def __call__(self, name: str) -> int:
        return int(getattr(self._now, name) - (0 if self._before is None else getattr(self._before, name)))


class Idleness:
    """Notices features that are on and do nothing; tells of each once."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._guesses = _Guesses()

    def check(self, stats: ExpertStats) -> list[str]:
        """Sentences for the log."""
        if stats.resident or stats.decode_steps < ENOUGH_STEPS:
            return []
        found = {name: f"{text}, in {stats.decode_steps} steps" for name, text in _idle(stats)}
        if wrong := self._guesses.check(stats):
            found["prefetch"] = wrong
        new = {name: sentence for name, sentence in found.items() if name not in self._told}
        self._told.update(new)
        return list(new.values())


def _idle(stats: ExpertStats) -> Iterator[tuple[str, str]]:
    """Which features did nothing since the start, and how that is said."""
    total = stats.total
    looked_up, several = total.hits + total.misses, total.misses >= ENOUGH_STEPS  # a few may go one way by chance
    if stats.slots and looked_up and total.hits == total.foretold:
        yield "cache", f"the cache of {stats.slots} experts is on, and none of {looked_up} was found there"
    asked = stats.decode_steps - (0 if stats.rest is None else stats.rest.steps)
    if stats.cpu_share != 0 and several and asked >= ENOUGH_STEPS and not total.cpu_experts:
        yield "cpu", f"experts may be computed on the CPU, and of {total.misses} missing ones none was"
    if stats.background and stats.slots and total.cpu_experts >= ENOUGH_STEPS and not total.admitted:
        yield (
            "background",
            f"experts may be copied to the GPU in the background, and of {total.cpu_experts} that the CPU computed "
            "none was",
        )


class _Guesses:
    """Whether prefetching is of use, from one window of steps to the next: hours of good guesses hide no bad ones."""

    def __init__(self) -> None:
        self._steps = 0  # when the window began
        self._total: LayerCounts | None = None

    def check(self, stats: ExpertStats) -> str | None:
        """A sentence for the log, at most one a window."""
        steps, since = stats.decode_steps - self._steps, _Since(stats.total, self._total)
        if steps < WINDOW_STEPS and stats.prefetch:
            return None
        self._steps, self._total = stats.decode_steps, stats.total
        if not stats.prefetch:  # off, or the link has no time for it now
            return None
        misses, prefetched, used = since("misses"), since("prefetched"), since("foretold")
        if not prefetched and misses >= ENOUGH_STEPS:
            return (
                f"experts may be copied to the GPU before their layer begins, and with {misses} missing ones none was, "
                f"in {steps} steps"
            )
        if prefetched >= ENOUGH_STEPS and used < LEAST_USED * prefetched:
            return (
                f"of {prefetched} experts that were copied to the GPU before their layer began {used / prefetched:.0%} "
                f"were used, in {steps} steps; prefetching rests for layers where that is so, but for a try at times"
            )
        return None
