"""One step after another: requests in, tokens out. Knows nothing of processes, sockets or text."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from ftengine.cache.sequences import SequenceCache
from ftengine.core import FinishReason, Request, SamplingParams, SequenceStatus
from ftengine.models.base import Model
from ftengine.scheduler.batch import Work, build_batch
from ftengine.scheduler.chunk import PrefillBudget
from ftengine.scheduler.jobs import Job, Limits, refusal
from ftengine.scheduler.sampler import Choice, sample
from ftengine.scheduler.scheduler import Scheduler
from ftengine.scheduler.stats import Counters
from ftengine.wire import Failed, Output, TokenLogprob

Event = Output | Failed

log = logging.getLogger(__name__)


class Engine:
    """The events each method returns are for the front, in order."""

    def __init__(self, model: Model, cache: SequenceCache, limits: Limits, budget: PrefillBudget) -> None:
        self.model = model
        self.cache = cache
        self.scheduler = Scheduler(cache, limits)
        self.budget = budget
        self.counters = Counters()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.jobs)

    def submit(self, request: Request) -> list[Event]:
        """Queues the request, or says at once why it cannot be served."""
        if request.id in self.scheduler.jobs:
            log.error("request %s is submitted twice; the second one is ignored", request.id)
            return []
        reason = refusal(request, self.scheduler.limits)
        overloaded = len(self.scheduler.waiting) >= self.scheduler.limits.max_waiting
        if reason is None and overloaded:
            reason = f"{len(self.scheduler.waiting)} requests are waiting already"
        if reason is not None:
            self.counters.requests.failed += 1
            return [Failed(request.id, reason, overloaded=overloaded)]
        self.scheduler.add(request)
        return []

    def cancel(self, request_id: str) -> list[Event]:
        """Ends the request now; what it computed stays in the prefix cache. Ids not known are ignored."""
        job = self.scheduler.jobs.get(request_id)
        if job is None:
            return []
        return [self._finish(job, FinishReason.CANCELLED, [])]

    def admit(self) -> list[Event]:
        """Lets waiting requests run as far as they fit. Apart from `step`, so that the front hears of it before."""
        admitted = self.scheduler.admit()
        for job in admitted:
            self.counters.admitted(job.sequence.prompt_length, job.sequence.cached)
        return [Output(job.id, [], job.sequence.cached) for job in admitted]

    def step(self) -> list[Event]:
        """Computes one batch and samples. A failing forward fails the batch's requests only."""
        started = time.perf_counter()
        work = self.scheduler.plan(self.budget.tokens)
        if not work:
            return []
        sampling = [self._job(item) for item in work if item.reaches_end]
        prefilled = sum(item.tokens for item in work if item.sequence.status is SequenceStatus.PREFILL)
        try:
            choices = self._compute(work, sampling)
        except Exception as error:
            return self._fail_batch(work, error)
        seconds = time.perf_counter() - started
        self.budget.measured(prefilled, seconds)
        self.counters.stepped(len(work), prefilled, seconds)
        return self._advance(work, dict(zip(sampling, choices, strict=True)))

    def _advance(self, work: list[Work], chosen: dict[Job, Choice | None]) -> list[Event]:
        """What the step computed becomes the sequences' own. chosen: the next token where one was sampled."""
        events: list[Event] = []
        for item in work:
            job = self._job(item)
            if job in chosen and chosen[job] is None:
                events.append(self._fail(job, "the model gave logits that are not numbers", keep=False))
                continue
            item.sequence.computed += item.tokens
            self.cache.commit(item.sequence)
            choice = chosen.get(job)
            if choice is not None:
                events.append(self._append(job, choice))
        return events

    def warm_up(self) -> None:
        """Computes a short prompt and two tokens, so that the first request pays for nothing extra.

        Raises RuntimeError if the model cannot do that.
        """
        prompt = [token % self.model.vocab_size for token in range(2 * self.cache.page_size)]
        prompt = prompt[: max(1, self.scheduler.limits.context - 2)]
        request = Request("warm-up", prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        events = self.submit(request)
        while self.has_work:
            events += self.admit() + self.step()
        for event in events:
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
        self.cache.clear()
        self.counters = Counters()

    def stats(self) -> dict[str, Any]:
        return self.counters.report(self.scheduler, self.budget.tokens)

    def _compute(self, work: list[Work], sampling: list[Job]) -> list[Choice | None]:
        with torch.inference_mode():
            logits = self.model.forward(build_batch(work, self.cache.page_size), self.cache.tensors)
            return sample(logits, [job.sampling for job in sampling]) if sampling else []

    def _append(self, job: Job, choice: Choice) -> Output:
        sequence = job.sequence
        sequence.status = SequenceStatus.DECODE
        sequence.tokens.append(choice.token)
        self.counters.tokens.generated += 1
        logprobs = None if choice.logprob is None else [choice.logprob]
        if choice.token in job.stop_ids:
            return self._finish(job, FinishReason.STOP, [choice.token], logprobs)
        if len(sequence.tokens) >= job.length_limit:
            return self._finish(job, FinishReason.LENGTH, [choice.token], logprobs)
        return Output(job.id, [choice.token], sequence.cached, logprobs=logprobs)

    def _finish(
        self, job: Job, reason: FinishReason, tokens: list[int], logprobs: list[TokenLogprob] | None = None
    ) -> Output:
        self.scheduler.remove(job)
        job.sequence.finish = reason
        if reason is FinishReason.CANCELLED:
            self.counters.requests.cancelled += 1
        else:
            self.counters.requests.finished += 1
        return Output(job.id, tokens, job.sequence.cached, finish=reason, logprobs=logprobs)

    def _fail(self, job: Job, message: str, *, keep: bool = True, overloaded: bool = False) -> Failed:
        self.scheduler.remove(job, keep=keep)
        self.counters.requests.failed += 1
        return Failed(job.id, message, overloaded=overloaded)

    def _fail_batch(self, work: list[Work], error: Exception) -> list[Event]:
        log.error("a step of %d sequences failed", len(work), exc_info=error)
        exhausted = _out_of_memory(error)
        if exhausted:
            self.budget.halve()
            message = "the engine ran out of memory in this step"
        else:
            message = f"the model failed in this step: {type(error).__name__}: {error}"
        return [self._fail(self._job(item), message, overloaded=exhausted) for item in work]

    def _job(self, item: Work) -> Job:
        return self.scheduler.jobs[item.sequence.request.id]


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The CPU allocator raises a plain RuntimeError: "DefaultCPUAllocator: can't allocate memory".
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
