"""The thread that writes to the disk: what is due, what it needs first, and what is never worth a write.

A recurrent state is tens of megabytes and a conversation ends somewhere else every few seconds, so an anchor is written
only when it has been the last of its conversation for a while, or when that one has had nothing written for long. What
later sessions start from (the end of tools and system text, what lies before a user's message, the end of a
conversation's first prompt) is written at once; what closes wide gaps between these (spread.py), after a while, or when
host memory is short. Chunks are written once and for all, before what hangs on them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ftengine.cache.tiers.books import EVERYTHING, Books, Victims
from ftengine.cache.tiers.disk import DiskTier
from ftengine.cache.tiers.index import subtree
from ftengine.cache.tiers.records import Anchor, Chunk, Record

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0  # that the end may be late: for one record
NICE = 10  # what is computed goes before hashing and writing
MOST_SESSIONS = 1024  # whose last write is remembered


@dataclass(frozen=True)
class Pace:
    """Seconds. settle: how long an anchor must have been its session's last; lag: how long a session may go on without
    one being written; retry: after the disk was full or failed; between: how old an anchor must be that is written only
    to close a gap, unless host memory is short."""

    settle: float = 10.0
    lag: float = 60.0
    retry: float = 30.0
    between: float = 60.0


class Writer:
    def __init__(self, books: Books, disk: DiskTier, pace: Pace, on_written: Callable[[], None]) -> None:
        """on_written: called in the thread when memory may have become free."""
        self._books = books
        self._disk = disk
        self._pace = pace
        self._on_written = on_written
        self._last: dict[str, float] = {}  # session -> when something of it was written
        self._paused = 0.0  # until then
        self._flush_until: float | None = None
        self._ended = False
        self.pressed = False  # someone waits for memory: anchors are written before they are due
        self.failing = False
        self.loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prompts-disk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def paused(self) -> bool:
        return self._ended or time.monotonic() < self._paused

    @property
    def ended(self) -> bool:
        return self._ended

    def press(self, pressed: bool) -> None:
        if pressed != self.pressed:
            with self._books.lock:
                self.pressed = pressed
                self._books.changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Writes everything that waits, for so long at the most, and ends the thread."""
        with self._books.lock:
            self._flush_until = time.monotonic() + seconds
            self._books.changed.notify_all()
        self._thread.join(seconds + GRACE_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # Linux: of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            self._load()
            while (record := self._next()) is not None:
                self._write(record)
        finally:
            self._ended = True
            self._on_written()

    def _load(self) -> None:
        try:
            self._disk.load()
        except OSError as error:
            self._fail(error)
        finally:
            self.loaded.set()

    def _next(self) -> Record | None:
        """Waits for something that is due; None at the end."""
        with self._books.lock:
            while True:
                now = time.monotonic()
                flushing = self._flush_until is not None
                if flushing and (now >= (self._flush_until or 0.0) or self.paused):
                    return None
                wait: float | None = self._paused - now
                if wait is not None and wait <= 0:
                    record, wait = self._due(now, everything=flushing or self.pressed)
                    if record is not None:
                        return record
                    if flushing:
                        return None
                self._books.changed.wait(wait)

    def _due(self, now: float, *, everything: bool) -> tuple[Record | None, float | None]:
        """Held: the books' lock. The next record to write, else how long until there is one."""
        wait: float | None = None
        best: Anchor | None = None
        for record in self._books.unwritten:
            if isinstance(record, Anchor):
                left = 0.0 if everything else self._due_at(record) - now
                if left > 0:
                    wait = left if wait is None else min(wait, left)
                elif best is None or self._urgency(record) > self._urgency(best):
                    best = record
        chunk = None if best is not None and not best.between else self._next_chunk()
        if best is None or chunk is not None:
            return chunk, wait
        return next((chunk for chunk in reversed(list(best.path())) if not chunk.disk), best), None

    def _next_chunk(self) -> Chunk | None:
        """Held: the books' lock."""
        for record in self._books.unwritten:
            parent = record.parent
            if isinstance(record, Chunk) and parent is not None and (parent.disk or parent.parent is None):
                return record
        return None

    def _urgency(self, anchor: Anchor) -> tuple[bool, bool, float]:
        """What is written first: of ends the newest, of what lies between them the oldest, for that goes first, too.
        Ends may be superseded yet, so they come later, but not when the thread is to end."""
        ending = self._flush_until is not None
        return anchor.lasting, anchor.between != ending, -anchor.born if anchor.between else anchor.born

    def _due_at(self, anchor: Anchor) -> float:
        if anchor.lasting or (anchor.between and self._books.tight):
            return anchor.born
        if anchor.between:
            return anchor.born + self._pace.between
        last = self._last.setdefault(anchor.worth.session, anchor.born)
        return min(anchor.born + self._pace.settle, max(last + self._pace.lag, anchor.born))

    def _write(self, record: Record) -> None:
        books = self._books
        path: list[Record] = [record, *record.path()]
        with books.lock:
            if not record.attached:
                return
            copy = books.begin_transfer(record)
            if copy is None:  # a chunk on no disk and in no memory is not in the index
                books.settle(record)
                return
            books.hold(path, 1)
        try:
            now = time.monotonic()
            victims = books.victims()
            if not self._disk.write(record, copy, victims):
                self._leave_out(record, victims)
            elif isinstance(record, Anchor):
                self._remember(record.worth.session, now)
            self._recovered()
        except OSError as error:
            self._fail(error)
        finally:
            with books.lock:
                books.hold(path, -1)
                books.end_transfer(record, copy)
                self.pressed = False  # who waits asks again if that was not enough
            self._on_written()

    def _leave_out(self, record: Record, victims: Victims) -> None:
        """There is no room for it, so there is none for what hung on it either when its value was told."""
        with self._books.lock:
            for each in subtree(record):
                if victims.value(each) != EVERYTHING:
                    self._books.settle(each)

    def _remember(self, session: str, now: float) -> None:
        self._last.pop(session, None)
        self._last[session] = now
        while len(self._last) > MOST_SESSIONS:
            del self._last[next(iter(self._last))]

    def _fail(self, error: OSError) -> None:
        self._paused = time.monotonic() + self._pace.retry
        if error.errno == errno.EAGAIN:
            return  # another server is busy writing
        if not self.failing:
            log.warning(
                "prompts are not written to %s for now: %s; serving goes on, and writing is tried again",
                self._disk.path,
                error.strerror or error,
            )
        self.failing = True

    def _recovered(self) -> None:
        if self.failing:
            self.failing = False
            log.info("prompts are written to %s again", self._disk.path)
