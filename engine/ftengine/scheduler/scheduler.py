"""Which sequences run, and what each step computes: admission, chunked prefill, preemption.

Pages are given for a whole prompt at admission and one at a time while decoding; nothing is held back for
`max_tokens`, because agents ask for tens of thousands and use hundreds. So pages can run out in the middle of an
answer. Then cached prefixes are forgotten, and after them the youngest running sequence is preempted: it waits again,
its pages stay in the prefix tree for as long as they are not needed, and it goes on where it was, recomputing what
was lost. The oldest is never preempted, so everything finishes.
"""

from __future__ import annotations

import bisect
import itertools

from ftengine.cache.sequences import SequenceCache
from ftengine.core import Request, Sequence, SequenceStatus
from ftengine.scheduler.batch import Work
from ftengine.scheduler.jobs import Job, Limits, make_job


class Scheduler:
    def __init__(self, cache: SequenceCache, limits: Limits) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting: list[Job] = []  # both lists by arrival
        self.running: list[Job] = []
        self.jobs: dict[str, Job] = {}
        self.preemptions = 0
        self._arrivals = itertools.count()
        self._blocked = False  # the first waiting did not fit, and nothing was released since

    def add(self, request: Request) -> Job:
        job = make_job(request, self.limits, next(self._arrivals))
        self.jobs[job.id] = job
        self.waiting.append(job)
        return job

    def admit(self) -> list[Job]:
        """Moves waiting jobs to running, first come first, as long as slots and pages allow; returns the new ones."""
        admitted: list[Job] = []
        while self.waiting and len(self.running) < self.limits.max_running and not self._blocked:
            job = self.waiting[0]
            # A page for each that runs, so that what is admitted now is not preempted at once.
            if not self.cache.admit(job.sequence, headroom=len(self.running)):
                assert self.running, "a request that was accepted does not fit into an empty cache"
                self._blocked = True
                break
            del self.waiting[0]
            bisect.insort(self.running, job, key=_arrival)
            job.sequence.status = SequenceStatus.PREFILL
            if not job.admitted:
                job.admitted, job.sequence.cached = True, job.sequence.computed
                admitted.append(job)
        return admitted

    def plan(self, prefill_tokens: int) -> list[Work]:
        """One step: a token of every decoding sequence and up to about `prefill_tokens` of the others."""
        decoding = [job for job in self.running if job.sequence.status is SequenceStatus.DECODE]
        # Oldest first, and only younger ones are preempted: what is planned stays planned.
        work = [Work(job.sequence, 1) for job in decoding if job in self.running and self._reserve(job)]
        return work + self._plan_prefill(prefill_tokens)

    def reserve_ahead(self, jobs: list[Job]) -> bool:
        """Pages for the token after the next one of each, without preemption; False, with nothing changed, if they are
        not to be had."""
        wanted = [(job.sequence, len(job.sequence.tokens) + 1) for job in jobs]
        missing = sum(max(0, self.cache.pages_for(tokens) - len(each.pages)) for each, tokens in wanted)
        return missing <= self.cache.available and all(self.cache.reserve(*each) for each in wanted)

    def restart(self, job: Job) -> None:
        """Its pages and state are of no use beyond what is cached: it waits, and computes the rest anew."""
        self._preempt(job, halfway=True)

    def remove(self, job: Job, *, keep: bool = True, halfway: bool = False) -> None:
        """The job is over. keep, halfway: as in SequenceCache.release."""
        del self.jobs[job.id]
        if job in self.running:
            self.running.remove(job)
            self.cache.release(job.sequence, keep=keep, halfway=halfway)
        else:
            self.waiting.remove(job)
        self._blocked = False
        job.sequence.status = SequenceStatus.FINISHED

    def check_idle(self) -> None:
        """With no job: raises AssertionError if something is leaked; see SequenceCache.check_idle."""
        assert not self.waiting, "a job is lost"
        assert not self.running, "a job is lost"
        self.cache.check_idle()

    def check_integrity(self) -> None:
        """Raises AssertionError if anything is leaked; see SequenceCache.check_integrity."""
        self.cache.check_integrity([job.sequence for job in self.running])
        assert len(self.jobs) == len(self.waiting) + len(self.running), "a job is lost"

    def _reserve(self, job: Job) -> bool:
        """A page for the next token of `job`, by preempting younger ones; False if it has to go itself."""
        while not self.cache.reserve(job.sequence, len(job.sequence.tokens)):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is job:
                return False
        return True

    def _preempt(self, job: Job, *, halfway: bool = False) -> None:
        self.running.remove(job)
        self.cache.release(job.sequence, halfway=halfway)
        job.sequence.status = SequenceStatus.WAITING
        bisect.insort(self.waiting, job, key=_arrival)
        self._blocked = False
        self.preemptions += 1

    def _plan_prefill(self, tokens: int) -> list[Work]:
        """Half for the oldest, so that it gets on; the rest shortest first, so that they need not wait for it."""
        prefilling = [job for job in self.running if job.sequence.status is SequenceStatus.PREFILL]
        if not prefilling:
            return []
        oldest, others = prefilling[0], sorted(prefilling[1:], key=lambda job: job.remaining)
        half = max(self.cache.page_size, tokens // 2)
        left = tokens - min(half, oldest.remaining)
        work: list[Work] = []
        for job in others:
            chunk = self._chunk(job.sequence, left)
            if chunk > 0:
                work.append(Work(job.sequence, chunk))
                left -= chunk
        chunk = self._chunk(oldest.sequence, min(half, oldest.remaining) + max(left, 0))
        return [Work(oldest.sequence, chunk), *work]

    def _chunk(self, sequence: Sequence, room: int) -> int:
        """Tokens of the next chunk: up to `room`, ending at the prompt's end or at a page boundary."""
        length, page_size = len(sequence.tokens), self.cache.page_size
        end = min(sequence.computed + room, length)
        boundary = self.cache.last_boundary(length)
        if sequence.computed < boundary < end:
            end = boundary
        elif end < length:
            end = end // page_size * page_size
        return end - sequence.computed


def _arrival(job: Job) -> int:
    return job.arrival
