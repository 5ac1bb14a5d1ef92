"""What the engine counts: the engine's part of /v1/stats, and the log line while it works."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from ftengine.cache.sequences import SequenceCache
from ftengine.scheduler.expert_stats import ExpertStats, Idleness, LayerCounts, describe
from ftengine.scheduler.prompt_stats import Fruitlessness, PromptStats, is_on, prompt_stats
from ftengine.scheduler.prompt_stats import describe as describe_reuse
from ftengine.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

VERSION = 2  # raised when a field changes its meaning or goes; new fields may come without


class RequestCounts(msgspec.Struct):
    running: int = 0
    waiting: int = 0
    finished: int = 0  # since start, as all below
    cancelled: int = 0
    failed: int = 0
    preempted: int = 0  # times, not requests


class TokenCounts(msgspec.Struct):
    prompt: int = 0  # of admitted requests, cached ones included
    cached: int = 0  # of those, taken from the prefix cache
    prefilled: int = 0  # computed by prefill, recomputation after preemption included
    generated: int = 0


class StepCounts(msgspec.Struct):
    count: int = 0
    mean_batch: float = 0.0  # sequences a step
    largest_batch: int = 0
    prefill_budget: int = 0  # tokens the next step may prefill
    p50_ms: float = 0.0  # of the last 1024 steps, as all below
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    longest_ms: float = 0.0  # of them


class CacheCounts(msgspec.Struct):
    page_size: int  # tokens
    pages_total: int = 0
    pages_used: int = 0  # by running sequences
    pages_cached: int = 0  # kept for later requests only
    pages_free: int = 0
    state_slots_total: int = 0  # of running sequences and anchors
    anchors: int = 0
    prefix_hits: int = 0  # requests admitted with at least one cached token
    page_evictions: int = 0  # cached pages that made way for others, or became useless by the next line
    anchor_evictions: int = 0  # places to go on from that made way for others


class EngineStats(msgspec.Struct):
    version: int
    uptime_s: float
    requests: RequestCounts
    tokens: TokenCounts
    steps: StepCounts
    cache: CacheCounts
    prompts: PromptStats
    experts: ExpertStats | None  # None: the model has no cache of experts on a GPU


class Counters:
    """Adds up while the engine works; `report` gives the whole picture."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.requests = RequestCounts()
        self.tokens = TokenCounts()
        self.prefix_hits = 0
        self.steps = 0
        self.largest_batch = 0
        self._sequences = 0
        self._seconds: deque[float] = deque(maxlen=1024)

    def admitted(self, prompt: int, cached: int) -> None:
        self.tokens.prompt += prompt
        self.tokens.cached += cached
        self.prefix_hits += cached > 0

    def stepped(self, sequences: int, prefilled: int, seconds: float) -> None:
        self.steps += 1
        self.tokens.prefilled += prefilled
        self.largest_batch = max(self.largest_batch, sequences)
        self._sequences += sequences
        self._seconds.append(seconds)

    def report(self, scheduler: Scheduler, prefill_budget: int, experts: ExpertStats | None) -> dict[str, Any]:
        """EngineStats as plain data."""
        cache = scheduler.cache
        requests = msgspec.structs.replace(
            self.requests,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preempted=scheduler.preemptions,
        )
        stats = EngineStats(
            version=VERSION,
            uptime_s=round(time.monotonic() - self.started, 3),
            requests=requests,
            tokens=self.tokens,
            steps=self._steps(prefill_budget),
            cache=self._cache(cache),
            prompts=prompt_stats(cache, scheduler.limits.max_running),
            experts=experts,
        )
        values: dict[str, Any] = msgspec.to_builtins(stats)
        return values

    def _steps(self, prefill_budget: int) -> StepCounts:
        ranked = sorted(self._seconds)

        def percentile(share: float) -> float:
            return round(1000 * ranked[min(len(ranked) - 1, int(share * len(ranked)))], 3) if ranked else 0.0

        return StepCounts(
            count=self.steps,
            mean_batch=round(self._sequences / self.steps, 3) if self.steps else 0.0,
            largest_batch=self.largest_batch,
            prefill_budget=prefill_budget,
            p50_ms=percentile(0.5),
            p90_ms=percentile(0.9),
            p99_ms=percentile(0.99),
            longest_ms=percentile(1.0),
        )

    def _cache(self, cache: SequenceCache) -> CacheCounts:
        return CacheCounts(
            page_size=cache.page_size,
            pages_total=cache.pages.count,
            pages_used=cache.pages_running,
            pages_cached=cache.tree.evictable,
            pages_free=cache.pages.free_count,
            state_slots_total=cache.slots.count,
            anchors=len(cache.tree.anchors),
            prefix_hits=self.prefix_hits,
            page_evictions=cache.page_evictions,
            anchor_evictions=cache.anchor_evictions,
        )


class WorkLog:
    """Lines every few seconds of work: speeds since the last ones, what is busy, and what is on and does nothing.

    Work may come in pieces far shorter than that: `pause` before the engine waits for requests, `go_on` after it.
    """

    def __init__(
        self,
        counters: Counters,
        scheduler: Scheduler,
        seconds: float,
        experts: Callable[[], ExpertStats | None] = lambda: None,
    ) -> None:
        self._counters = counters
        self._scheduler = scheduler
        self._seconds = seconds
        self._experts = experts
        self._idleness = Idleness()
        self._fruitlessness = Fruitlessness()
        self._before: LayerCounts | None = None
        self._working: float | None = time.monotonic()  # since when; None: there is nothing to do
        self._restart()

    def line(self) -> str | None:
        """The line if one is due."""
        elapsed = self._spent()
        if elapsed < self._seconds:
            return None
        tokens, cache = self._counters.tokens, self._scheduler.cache
        text = (
            f"prompt {(tokens.prefilled - self._prefilled) / elapsed:.1f} tok/s, "
            f"decode {(tokens.generated - self._generated) / elapsed:.1f} tok/s, "
            f"running {len(self._scheduler.running)}, waiting {len(self._scheduler.waiting)}, "
            f"KV pages {cache.pages_running} used and {cache.tree.evictable} cached "
            f"of {cache.pages.count}, prompts reused {describe_reuse(cache.reuse.tiers, self._reused)}"
        )
        if found := self._of_experts(elapsed):
            text += f", {found}"
        self._restart()
        return text

    def admitted(self) -> None:
        """After requests may have been admitted: warns of a prompt cache that is of no use."""
        cache = self._scheduler.cache
        sentence = self._fruitlessness.check(cache.reuse)
        if sentence is not None and is_on(cache, self._scheduler.limits.max_running):
            log.warning("%s", sentence)

    def pause(self) -> None:
        """Time without work does not count as slow work."""
        self._worked, self._working = self._spent(), None

    def go_on(self) -> None:
        self._working = time.monotonic()

    def _spent(self) -> float:
        """Seconds of work since the last line."""
        return self._worked + (0.0 if self._working is None else time.monotonic() - self._working)

    def _of_experts(self, elapsed: float) -> str:
        stats = self._experts()
        if stats is None:
            return ""
        for sentence in self._idleness.check(stats):
            log.warning("%s", sentence)
        text = describe(stats.total, self._before, elapsed)
        self._before = stats.total
        return text

    def _restart(self) -> None:
        tokens = self._counters.tokens
        self._worked = 0.0
        if self._working is not None:
            self._working = time.monotonic()
        self._prefilled, self._generated = tokens.prefilled, tokens.generated
        self._reused = dict(self._scheduler.cache.reuse.tiers)
