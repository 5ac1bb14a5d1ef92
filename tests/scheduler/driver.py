"""Drives an Engine in the test's own process and collects what it says of each request."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache
from ftengine.core import FinishReason, Request, Reused, SamplingParams
from ftengine.scheduler.chunk import PrefillBudget
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.jobs import Limits
from ftengine.wire import Failed, Output, TokenLogprob


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    overloaded: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    outputs: int = 0
    reused: Reused | None = None


class Driver:
    """pages, slots: the cache's size; chunk: largest prefill a step; cache_options: more of SequenceCache's."""

    def __init__(self, model, *, pages=64, page_size=4, slots=16, running=4, context=None, chunk=64, **cache_options):
        tensors = allocate_cache(model.cache_layout, pages, page_size, slots)
        cache = SequenceCache(tensors, pages, slots, **cache_options)
        limits = Limits(
            context=context or min(model.max_context, pages * page_size),
            max_running=running,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
        self.model = model
        self.cache = cache
        self.engine = Engine(model, cache, limits, PrefillBudget(chunk, page_size, seconds=60))
        self.results: dict[str, Result] = {}

    def submit(self, name: str, prompt: list[int], count: int = 8, *, request=None, **sampling) -> None:
        """request: more of Request's own fields."""
        params = SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **sampling})
        self.results[name] = Result()
        self._take(self.engine.submit(Request(name, list(prompt), params, **(request or {}))))

    def cancel(self, name: str) -> None:
        self._take(self.engine.cancel(name))

    def step(self) -> None:
        self._take(self.engine.admit())
        self._take(self.engine.step())

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                self.engine.scheduler.check_integrity()
                return
            self.step()
        raise AssertionError(f"still working after {limit} steps")

    def one(self, prompt: list[int], count: int = 8, **sampling) -> Result:
        name = f"one-{len(self.results)}"
        self.submit(name, prompt, count, **sampling)
        self.run()
        return self.results[name]

    def _take(self, events) -> None:
        for event in events:
            result = self.results[event.id]
            assert result.finish is None, f"{event.id} says something after its end"
            assert result.error is None, f"{event.id} says something after it failed"
            if isinstance(event, Failed):
                result.error, result.overloaded = event.message, event.overloaded
                continue
            assert isinstance(event, Output)
            result.outputs += 1
            result.tokens += event.tokens
            result.cached = event.cached_tokens
            result.reused = result.reused or event.reused
            result.logprobs += event.logprobs or []
            result.finish = event.finish
