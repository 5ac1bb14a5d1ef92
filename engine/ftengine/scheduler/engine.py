"""One step after another: requests in, tokens out. Knows nothing of processes, sockets or text.

A step is begun and finished. In between a GPU computes, and the host is free to hand on what the step before gave; a
model on the CPU computes when the step is finished.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from ftengine.cache.sequences import SequenceCache
from ftengine.core import FinishReason, Request, SamplingParams, Sequence, SequenceStatus
from ftengine.errors import FtError
from ftengine.memory.gpu_errors import is_fatal, is_out_of_memory
from ftengine.models.base import Deferred, Launching, Model, Pending
from ftengine.scheduler.ahead import launching_ahead, work_ahead
from ftengine.scheduler.batch import BatchBuilder, Work
from ftengine.scheduler.chunk import PrefillBudget
from ftengine.scheduler.expert_stats import ExpertStats, expert_stats
from ftengine.scheduler.jobs import Job, Limits, refusal
from ftengine.scheduler.sampler import Choice, sample
from ftengine.scheduler.scheduler import Scheduler
from ftengine.scheduler.stats import Counters
from ftengine.scheduler.step import Choices, Step
from ftengine.wire import Failed, Fatal, Output, TokenLogprob

if TYPE_CHECKING:
    from ftengine.scheduler.device_sampler import DeviceSampler, Drawn

Event = Output | Failed

log = logging.getLogger(__name__)


class Engine:
    """The events each method returns are for the front, in order.

    lost: why this process cannot compute any more; every request has failed then, and only a new process helps.
    """

    def __init__(self, model: Model, cache: SequenceCache, limits: Limits, budget: PrefillBudget) -> None:
        self.model = model
        self.cache = cache
        self.scheduler = Scheduler(cache, limits)
        self.budget = budget
        self.counters = Counters()
        self.lost: Fatal | None = None
        self.device_sampler = device_sampler(model, limits)
        self._launching = model if isinstance(model, Launching) else None
        self._batches = BatchBuilder(cache.page_size)
        self._ahead = launching_ahead(model)
        self._step: Step | None = None
        self._next: Step | None = None  # launched ahead of the end of `_step`, or of its being begun
        self._ended = 0.0  # when the last step did
        self._stalled = False  # the last plan was empty

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.jobs) or self._next is not None

    @property
    def stalled(self) -> bool:
        """Whether nothing can be computed before a message comes, or a transfer of the cache ends."""
        return self._stalled and self.has_work and self._next is None

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
        """Ends the request now; what it computed stays in the prefix cache. Ids not known are ignored.

        Between two steps only: while one computes, the device is writing pages and states.
        """
        assert self._step is None, "cancelled while a step computes"
        job = self.scheduler.jobs.get(request_id)
        return [] if job is None else [self._finish(job, FinishReason.CANCELLED, [])]

    def admit(self) -> list[Event]:
        """Lets waiting requests run as far as they fit. Apart from `step`, so that the front hears of it before."""
        admitted = self.scheduler.admit()
        for job in admitted:
            self.counters.admitted(job.sequence.prompt_length, job.sequence.cached)
        return [Output(job.id, [], job.sequence.cached, reused=self.cache.reused(job.sequence)) for job in admitted]

    def step(self) -> list[Event]:
        """Computes one batch and samples."""
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """Plans the next step and launches it, and where that is possible the one after it, too: see ahead.py.
        Everything about a step, faults too, is told by `finish`."""
        assert self._step is None, "a step is begun already"
        self._step, self._next = self._next, None
        if self._step is None:
            work = self.scheduler.plan(self.budget.tokens)
            self._step = self._begun(work, None) if work else None
            self._stalled = not work
        if self._step is not None and self._ahead is not None and self.device_sampler is not None:
            work = work_ahead(self._step, self.scheduler, self.device_sampler, self._ahead.rows_ahead)
            self._next = self._begun(work, self._step.drawn) if work else None

    def _begun(self, work: list[Work], before: Drawn | None) -> Step:
        """before: what the step gives that this one is launched ahead of the end of."""
        started = time.perf_counter()
        sampling = [self._job(item) for item in work if item.reaches_end]
        prefilled = sum(item.tokens for item in work if item.sequence.status is SequenceStatus.PREFILL)
        drawn: list[Drawn] = []
        pending: Pending[Choices] | Exception
        try:
            pending = self._launch(work, sampling, before, drawn)
        except Exception as error:
            pending = error
        return Step(work, sampling, prefilled, started, pending, drawn[0] if drawn else None)

    def finish(self) -> list[Event]:
        """Waits for the step that was begun, if one was, and takes its tokens. A fault fails its requests only, unless
        it is one after which nothing can be computed any more: see `lost`."""
        step, self._step = self._step, None
        if step is None:
            return []
        try:
            if isinstance(step.pending, Exception):
                raise step.pending
            with torch.inference_mode():
                choices = step.pending.collect()()
        except Exception as error:
            return self._fail_step(step, error)
        now = time.perf_counter()
        seconds, self._ended = now - max(step.started, self._ended), now
        work = step.live
        if work:
            self.budget.measured(step.prefilled, seconds)
            self.counters.stepped(len(work), step.prefilled, seconds)
        chosen = dict(zip(step.sampling, choices, strict=True))
        self._part(step, {job.sequence for job, choice in chosen.items() if choice is None})
        return self._advance(work, chosen)

    def _advance(self, work: list[Work], chosen: dict[Job, Choice | None]) -> list[Event]:
        """What the step computed becomes the sequences' own. chosen: the next token where one was sampled."""
        events: list[Event] = []
        for item in work:
            job = self._job(item)
            if job in chosen and chosen[job] is None:
                events.append(self._fail(job, "the model gave logits that are not numbers", keep=False))
                continue
            item.sequence.computed += item.tokens
            choice = chosen.get(job)
            self.cache.commit(item.sequence, ending=choice is not None and self._ends(job, choice) is not None)
            if choice is not None:
                # Where the host had to draw the token, the step ahead went on with another one.
                astray = job.sampling.wide and self._discard(job)
                events.append(self._append(job, choice, halfway=astray))
                if astray and job.id in self.scheduler.jobs:
                    job.sampling.take_back()
                    self.scheduler.restart(job)
        return events

    def _part(self, step: Step, broken: set[Sequence]) -> None:
        """Those that ended with the step before are released as this one, launched ahead of its end, has left them."""
        for item in step.work:
            sequence = item.sequence
            if sequence in step.parting:
                if sequence not in broken:
                    sequence.computed += item.tokens
                    self.cache.commit(sequence, ending=True)
                self.scheduler.parted(sequence, keep=sequence not in broken, halfway=sequence in broken)

    def _discard(self, job: Job) -> bool:
        """What a step ahead computes for it is for nothing. Returns whether there is any."""
        if self._next is None or not self._next.computes(job.sequence):
            return False
        self._next.discarded.add(job.sequence)
        return True

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
        if self.device_sampler is not None:
            with torch.inference_mode():
                self.device_sampler.warm_up(torch.zeros(1, self.model.vocab_size, device=self.device_sampler.device))
        self.cache.clear()
        self.counters = Counters()

    def rest(self, idle: bool) -> None:
        """See cache.tiers.base.Tiers.rest."""
        if self.cache.tiers is not None:
            self.cache.tiers.rest(idle)

    def close(self, seconds: float) -> None:
        """What is worth it is written to disk, for at most that long. Nothing is to be computed afterwards."""
        if self.cache.tiers is not None:
            self.cache.tiers.close(seconds)

    def stats(self, *, layers: bool = False) -> dict[str, Any]:
        """layers: with the expert cache's numbers of each layer."""
        return self.counters.report(self.scheduler, self.budget.tokens, self.expert_stats(layers=layers))

    def expert_stats(self, *, layers: bool = False) -> ExpertStats | None:
        """Between two steps: it waits for the device."""
        return expert_stats(self.model, layers=layers)

    def _launch(
        self, work: list[Work], sampling: list[Job], before: Drawn | None, drawn: list[Drawn]
    ) -> Pending[Choices]:
        """drawn: takes what the device sampler queues."""
        states = [job.sampling for job in sampling]

        def sampler(logits: torch.Tensor) -> Choices:
            if self.device_sampler is not None and states:
                drawn.append(self.device_sampler.queue(logits, states))
                return drawn[0].choices
            return lambda: sample(logits, states) if states else []

        with torch.inference_mode():
            batch, tensors = self._batches.build(work), self.cache.tensors
            if before is not None and self._ahead is not None:
                before.keep()
                return self._ahead.launch_ahead(batch, tensors, before.hand_on, sampler)
            if self._launching is not None:
                return self._launching.launch(batch, tensors, sampler)
        return Deferred(lambda: sampler(self.model.forward(batch, tensors)))

    def _ends(self, job: Job, choice: Choice) -> FinishReason | None:
        """Why its next token is its last; None if it is not."""
        if choice.token in job.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(job.sequence.tokens) + 1 >= job.length_limit else None

    def _append(self, job: Job, choice: Choice, *, halfway: bool) -> Output:
        """halfway: its state is not the one after the tokens before this one."""
        sequence, reason = job.sequence, self._ends(job, choice)
        sequence.status = SequenceStatus.DECODE
        sequence.tokens.append(choice.token)
        self.counters.tokens.generated += 1
        logprobs = None if choice.logprob is None else [choice.logprob]
        if reason is not None:
            return self._finish(job, reason, [choice.token], logprobs, halfway=halfway)
        return Output(job.id, [choice.token], sequence.cached, logprobs=logprobs)

    def _finish(
        self,
        job: Job,
        reason: FinishReason,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None = None,
        *,
        halfway: bool = False,
    ) -> Output:
        if self._next is not None and self._next.computes(job.sequence):
            self._next.parting.add(job.sequence)
            self.scheduler.part(job)
        else:
            self.scheduler.remove(job, halfway=halfway)
        job.sequence.finish = reason
        if reason is FinishReason.CANCELLED:
            self.counters.requests.cancelled += 1
        else:
            self.counters.requests.finished += 1
        return Output(job.id, tokens, job.sequence.cached, finish=reason, logprobs=logprobs)

    def _fail(
        self, job: Job, message: str, *, keep: bool = True, halfway: bool = False, overloaded: bool = False
    ) -> Failed:
        self.scheduler.remove(job, keep=keep, halfway=self._discard(job) or halfway)
        self.counters.requests.failed += 1
        return Failed(job.id, message, overloaded=overloaded)

    def _fail_step(self, step: Step, error: Exception) -> list[Event]:
        jobs = [self._job(item) for item in step.live]
        log.error("a step of %d sequences failed", len(jobs), exc_info=error)
        exhausted = is_out_of_memory(error)
        if exhausted:
            self.budget.halve()
            message = "the engine ran out of memory in this step"
        else:
            first = str(error).strip().partition("\n")[0]  # torch goes on with advice for its own users
            message = f"the model failed in this step: {type(error).__name__}: {first}"
        if is_fatal(error) or isinstance(error, FtError):
            self.lost = Fatal(message, getattr(error, "next_step", ""))
            jobs = list(self.scheduler.jobs.values())
        for sequence in step.parting:
            self.scheduler.parted(sequence, halfway=True)
        return [self._fail(job, message, halfway=True, overloaded=exhausted) for job in jobs]

    def _job(self, item: Work) -> Job:
        return self.scheduler.jobs[item.sequence.request.id]


def device_sampler(model: Model, limits: Limits) -> DeviceSampler | None:
    """None where logits come to the host's memory."""
    device = getattr(model, "device", None)
    if device is None or device.type == "cpu":
        return None
    # Imported here: there is no Triton where there is no GPU.
    from ftengine.scheduler.device_sampler import DeviceSampler

    return DeviceSampler(limits.vocab_size, limits.max_running, device)
