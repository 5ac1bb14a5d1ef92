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
        self.parting: list[Sequence] = []  # whose jobs are over, while a step still computes their last token
        self.preemptions = 0
        self._arrivals = itertools.count()
        self._blocked = False  # the first waiting did not fit, and nothing was released since

    @property
    def computing(self) -> list[Job]:
        """Those that run and take part in steps."""
        return [job for job in self.running if job.sequence.status is not SequenceStatus.RESTORING]

    def add(self, request: Request) -> Job:
        job = make_job(request, self.limits, next(self._arrivals))
        self.jobs[job.id] = job
        self.waiting.append(job)
        return job

    def admit(self) -> list[Job]:
        """Moves waiting jobs to running, first come first, as long as slots and pages allow; returns those that are new
        and have what the caches hold of them."""
        admitted = self._restored()
        while self.waiting and len(self.running) + len(self.parting) < self.limits.max_running and not self._blocked:
            job = self.waiting[0]
            # A page for each that runs, so that what is admitted now is not preempted at once.
            if not self.cache.admit(job.sequence, headroom=len(self.running)):
                busy = self.running or self.parting or self.cache.copying
                assert busy, "a request that was accepted does not fit into an empty cache"
                self._blocked = True
                break
            del self.waiting[0]
            bisect.insort(self.running, job, key=_arrival)
            if self.cache.restoring(job.sequence):
                job.sequence.status = SequenceStatus.RESTORING
            else:
                admitted += self._ready(job)
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

    def part(self, job: Job) -> None:
        """The job is over, but a step that was launched computes one token more of it: see `parted`."""
        del self.jobs[job.id]
        self.running.remove(job)
        self.parting.append(job.sequence)
        job.sequence.status = SequenceStatus.FINISHED

    def parted(self, sequence: Sequence, *, keep: bool = True, halfway: bool = False) -> None:
        """That step has ended."""
        self.parting.remove(sequence)
        self.cache.release(sequence, keep=keep, halfway=halfway)
        self._blocked = False

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
        assert not self.parting, "a sequence is lost"
        self.cache.check_idle()

    def check_integrity(self) -> None:
        """Raises AssertionError if anything is leaked; see SequenceCache.check_integrity."""
        self.cache.check_integrity([job.sequence for job in self.running] + self.parting)
        assert len(self.jobs) == len(self.waiting) + len(self.running), "a job is lost"

    def _reserve(self, job: Job) -> bool:
        """A page for the next token of `job`, by preempting younger ones; False if it has to go itself, or to sit out a
        step because transfers of the cache hold what it needs."""
        while not self.cache.reserve(job.sequence, len(job.sequence.tokens)):
            youngest = self.computing[-1]
            if youngest is job and self.cache.copying:
                return False
            self._preempt(youngest)
            if youngest is job:
                return False
        return True

    def _restored(self) -> list[Job]:
        """Takes note of transfers that have ended."""
        before, ready = self.cache.copying, []
        for sequence, there in self.cache.tick():
            job = self.jobs[sequence.request.id]
            if there:
                ready += self._ready(job)
            else:
                self._wait(job)
        if self.cache.copying < before:
            self._blocked = False
        return ready

    def _ready(self, job: Job) -> list[Job]:
        """It can prefill now. Returns it if that is so for the first time."""
        job.sequence.status = SequenceStatus.PREFILL
        if job.admitted:
            return []
        job.admitted, job.sequence.cached = True, job.sequence.computed
        return [job]

    def _preempt(self, job: Job, *, halfway: bool = False) -> None:
        self.cache.release(job.sequence, halfway=halfway, below=False)
        self._wait(job)
        self.preemptions += 1

    def _wait(self, job: Job) -> None:
        """It holds nothing any more."""
        self.running.remove(job)
        job.sequence.status = SequenceStatus.WAITING
        bisect.insort(self.waiting, job, key=_arrival)
        self._blocked = False

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
                work.append(self._work(job.sequence, chunk))
                left -= work[-1].tokens
        chunk = self._chunk(oldest.sequence, min(half, oldest.remaining) + max(left, 0))
        return [self._work(oldest.sequence, chunk), *work]

    def _work(self, sequence: Sequence, tokens: int) -> Work:
        """With the states that are to be kept on the way."""
        end, captures = self.cache.plan(sequence, sequence.computed + tokens)
        return Work(sequence, end - sequence.computed, captures=captures)

    def _chunk(self, sequence: Sequence, room: int) -> int:
        """Tokens of the next chunk: up to `room`, ending at the prompt's end or at a page boundary."""
        length, page_size = len(sequence.tokens), self.cache.page_size
        end = min(sequence.computed + room, length)
        if end < length:
            end = end // page_size * page_size
        return end - sequence.computed


def _arrival(job: Job) -> int:
    return job.arrival
