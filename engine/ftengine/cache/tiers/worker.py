"""The tiers' thread: restores first, then paths to keep, a record at a time: a restore waits for one at the most."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

import torch

from ftengine.cache.tiers.base import Ticket
from ftengine.cache.tiers.keeping import Keeping
from ftengine.cache.tiers.restoring import Restoring

log = logging.getLogger(__name__)

NICE = 5
BREATH_SECONDS = 5e-5  # between two records, for the step loop to get the interpreter
POLL_SECONDS = 0.05  # while a path waits for memory; the disk's thread ends the wait sooner
CLOSED = "the server ends"
GRACE_SECONDS = 1.0  # that the end may be late: for one record

T = TypeVar("T")
Job = Keeping | Restoring | Callable[[], None]  # the last is done at once


class Worker:
    def __init__(self, wake: Callable[[], None], meanwhile: Callable[[], bool] = lambda: False) -> None:
        """wake: called in the thread when a ticket is done. meanwhile: called in the thread while there is nothing else
        to do, after nudge() and after each job, until it returns False."""
        self._wake = wake
        self._meanwhile = meanwhile
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._restores: deque[Restoring] = deque()
        self._keeps: deque[tuple[Keeping, Generator[bool, None, None]]] = deque()
        self._end: float | None = None  # when to leave what is left
        self._over = False  # nobody takes what is put in any more
        self._thread = threading.Thread(target=self._run, name="prompts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not (self._keeps or self._restores or self._inbox.qsize())

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def put(self, job: Job) -> None:
        self._inbox.put(job)
        if self._over:
            self._refuse()

    def nudge(self) -> None:
        """Memory may have become free, or there is time for what is done meanwhile."""
        self._inbox.put(None)

    def close(self, seconds: float) -> None:
        """Ends after the paths that are queued, or after so many seconds; every ticket is done then."""
        self._end = time.monotonic() + seconds
        self.nudge()
        self._thread.join(seconds + GRACE_SECONDS)

    def _run(self) -> None:
        # Of this thread alone, on Linux. Where a lane has most CPUs, the others share few: steps are launched first.
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            self._work()
        finally:
            self._leave()

    def _work(self) -> None:
        waits, more = False, False
        with torch.no_grad():
            while True:
                nothing = not (self._restores or self._keeps or more)
                self._take(wait=(waits or nothing) and self._end is None)
                waits = False
                if self._end is not None and (time.monotonic() > self._end or not (self._restores or self._keeps)):
                    return
                if self._restores:
                    self._restore(self._restores.popleft())
                elif self._keeps:
                    waits = self._keep()
                    time.sleep(BREATH_SECONDS)
                more = not (self._restores or self._keeps) and bool(_attempt(self._meanwhile))

    def _take(self, *, wait: bool) -> None:
        """What was put in, after waiting for it if there is nothing that can go on."""
        try:
            while True:
                job = self._inbox.get(block=wait, timeout=POLL_SECONDS if self._keeps else None)
                wait = False
                if isinstance(job, Restoring):
                    self._restores.append(job)
                elif isinstance(job, Keeping):
                    self._keeps.append((job, job.steps()))
                elif job is not None:
                    _attempt(job)
        except queue.Empty:
            pass

    def _restore(self, job: Restoring) -> None:
        try:
            job.run()
        except Exception as error:
            self._failed(job.ticket, error)
        finally:
            self._done(job.ticket)

    def _keep(self) -> bool:
        """One record. Whether the path waits for memory."""
        job, steps = self._keeps[0]
        try:
            waits = next(steps, None)
        except Exception as error:
            self._failed(job.ticket, error)
            waits = None
        if waits is None:
            self._keeps.popleft()
            self._done(job.ticket)
        return bool(waits)

    def _failed(self, ticket: Ticket, error: Exception) -> None:
        log.error("a prompt could not be moved between the tiers: %s", error, exc_info=True)
        ticket.tokens, ticket.reason = 0, str(error) or type(error).__name__

    def _done(self, ticket: Ticket) -> None:
        ticket.done = True
        _attempt(self._wake)

    def _leave(self) -> None:
        """Nobody waits for ever for what is left."""
        self._over = True
        while self._keeps:
            job, steps = self._keeps.popleft()
            _attempt(steps.close)  # lets go of what it holds
            self._give_up(job.ticket)
        while self._restores:
            self._give_up(self._restores.popleft().ticket)
        self._refuse()

    def _refuse(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._inbox.get_nowait()
                if isinstance(job, Keeping | Restoring):
                    self._give_up(job.ticket)

    def _give_up(self, ticket: Ticket) -> None:
        ticket.tokens, ticket.reason = 0, CLOSED
        self._done(ticket)


def _attempt(call: Callable[[], T]) -> T | None:
    """None where it fails: the thread has others to serve."""
    try:
        return call()
    except Exception:
        log.exception("the prompt cache's thread goes on after a fault")
        return None
