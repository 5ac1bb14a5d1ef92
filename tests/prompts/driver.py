"""An engine in the test's own process, with all its tiers, opened as the engine process opens it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ftengine.config import EngineConfig, Resolved
from ftengine.core import Boundary, FinishReason, Request, Reused, SamplingParams
from ftengine.models.base import Model
from ftengine.process import SAVE_SECONDS
from ftengine.scheduler.beginning import Beginning
from ftengine.scheduler.start_cpu import serve_on_cpu
from ftengine.scheduler.timeline import Timeline
from ftengine.weights.checkpoint import Checkpoint
from ftengine.wire import Failed, Output, TokenLogprob
from tests.prompts.edits import CONTROLS

WAIT_SECONDS = 60.0


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0
    reused: Reused | None = None
    finish: FinishReason | None = None


class PromptEngine:
    """model: loaded already, from config.model_dir."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.engine = serve_on_cpu(_beginning(config), model, Resolved(1 << 40, "in a test")).engine
        self.answers: dict[str, Answer] = {}
        self._numbers = itertools.count()

    @property
    def cache(self):
        return self.engine.cache

    def submit(
        self,
        prompt: list[int],
        boundaries: Iterable[Boundary] = (),
        count: int = 4,
        *,
        session: str = "",
        side: bool = False,
    ) -> str:
        name = f"r{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0)
        request = Request(name, list(prompt), sampling, list(boundaries), CONTROLS, session, side)
        self.answers[name] = Answer()
        self._take(self.engine.submit(request))
        return name

    def step(self) -> None:
        self._take(self.engine.admit())
        self._take(self.engine.step())

    def cancel(self, name: str) -> None:
        self._take(self.engine.cancel(name))

    def finish(self) -> None:
        """Until nothing is to be computed any more."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.engine.has_work:
            assert time.monotonic() < deadline, "the engine does not come to an end"
            self.step()

    def one(self, prompt: list[int], boundaries: Iterable[Boundary] = (), count: int = 4, **options) -> Answer:
        name = self.submit(prompt, boundaries, count, **options)
        self.finish()
        return self.answers[name]

    def check(self) -> None:
        """With nothing running."""
        self.engine.scheduler.check_integrity()
        self.engine.scheduler.check_idle()

    def close(self) -> None:
        """As the engine process ends: what is worth it goes to disk."""
        self.engine.close(SAVE_SECONDS)

    def settle(self) -> None:
        """Until the lower tiers have copied what they were given."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.cache.copying:
            assert time.monotonic() < deadline, "the tiers do not come to an end"
            time.sleep(0.001)
            self.cache.tick()

    def _take(self, events: Iterable[Output | Failed]) -> None:
        for event in events:
            answer = self.answers[event.id]
            assert isinstance(event, Output), event
            assert answer.finish is None, f"{event.id} says something after its end"
            answer.tokens += event.tokens
            answer.logprobs += event.logprobs or []
            answer.cached = event.cached_tokens
            answer.reused = answer.reused or event.reused
            answer.finish = event.finish


def _beginning(config: EngineConfig) -> Beginning:
    threads, dtype = Resolved(1, "in a test"), Resolved(config.dtype, "in a test")
    checkpoint = Checkpoint.open(config.model_dir)
    return Beginning(config, checkpoint, None, None, threads, dtype, lambda stage, done: None, Timeline())
