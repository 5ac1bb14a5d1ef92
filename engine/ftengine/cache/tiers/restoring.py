"""Restoring a path: records that are in host memory go to the device, those on disk are read and checked ahead of it.

A record that turns out to be damaged leaves the index with all that hangs on it, and the deepest place that is left
takes over; what was loaded before stays of use, since the path of tokens is the same. One that cannot be read for
another reason ends the restore, and stays: the next one may find it in order.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ftengine.cache.tiers.arena import Bytes
from ftengine.cache.tiers.base import CHUNK_TOKENS, Found, Ticket
from ftengine.cache.tiers.books import NOTHING, Books
from ftengine.cache.tiers.disk import DiskTier
from ftengine.cache.tiers.format import BadRecord
from ftengine.cache.tiers.index import Place
from ftengine.cache.tiers.mover import Mover, slots_of
from ftengine.cache.tiers.records import Anchor, Copy, Record

BREATH_SECONDS = 5e-5  # between two records, for the step loop to get the interpreter
READ_AHEAD = 4  # records that are read and checked while others are copied
BATCH = 8  # records between two waits for the device


@dataclass(eq=False)
class _Content:
    """A record's bytes, once `ready`: in the arena, held, or in memory of their own."""

    record: Record
    copy: Copy | None
    tokens: Bytes | None
    state: Bytes | None
    ready: Future[None] | None = None


@dataclass(eq=False)
class Restoring:
    """One path being restored."""

    found: Found
    tokens: bytes
    start: int
    pages: list[int]
    slot: int
    owner: tuple[str, bool, int]  # session, side, turn
    ticket: Ticket
    mark: Any
    books: Books
    mover: Mover
    disk: DiskTier | None
    readers: ThreadPoolExecutor | None
    page_size: int
    loaded: set[Record] = field(default_factory=set)  # chunks that are in place already
    passed: list[_Content] = field(default_factory=list)  # on their way to the device

    def __post_init__(self) -> None:
        self._victims = self.books.victims()

    def run(self) -> None:
        """Sets the ticket's tokens and reason."""
        self.mover.begin(self.mark)
        place: Place | None = self.found.handle
        while place is not None:
            held = self._hold(place)
            if held is not None:
                try:
                    bad = self._load(place)
                finally:
                    self._let_go()
                    self.books.hold(held, -1)
                if bad is None and all(record.attached for record in held):
                    self.ticket.tokens = place.tokens
                    if place.tokens == self.found.tokens:
                        self.ticket.reason = ""
                    self._used(held)
                    return
                if bad is not None and not self._given_up(*bad):
                    break
            place = self.books.index.find(self.tokens, self.found.tokens, self.start)
        if not self.books.index.stateful:
            self.ticket.tokens = self.start

    def _hold(self, place: Place) -> list[Record] | None:
        """All of the place's records, held; None if some are gone by now."""
        records: list[Record] = [*place.chunks, *([place.last] if place.last is not None else [])]
        with self.books.lock:
            if not all(record.attached for record in records):
                self.ticket.reason = "it was given up before it could be restored"
                return None
            self.books.hold(records, 1)
        return records

    def _load(self, place: Place) -> tuple[Record, BadRecord | OSError] | None:
        """Puts everything in place; or the first record that could not be read, and why."""
        ahead: deque[_Content] = deque()
        wanted = iter([record for record in place.records(self.start) if record not in self.loaded])
        try:
            while True:
                while len(ahead) < READ_AHEAD and (record := next(wanted, None)) is not None:
                    ahead.append(self._fetch(record))
                if not ahead:
                    break
                content = ahead.popleft()
                self.passed.append(content)
                try:
                    if content.ready is not None:
                        content.ready.result()
                except (BadRecord, OSError) as error:
                    return content.record, error
                self._to_device(content, place)
                time.sleep(BREATH_SECONDS)
                if len(self.passed) >= BATCH:
                    self._let_go()
            return None
        finally:
            for content in ahead:
                if content.ready is not None:
                    content.ready.exception()  # its memory is in use until then
            self.passed += ahead

    def _fetch(self, record: Record) -> _Content:
        books = self.books
        copy = books.begin_transfer(record)
        if copy is not None:
            books.host.read += record.worth.bytes
            tokens, state = self._views(copy)
            return _Content(record, copy, tokens, state)
        sizes = self._sizes(record)
        copy = self._memory(record, sizes)
        if copy is not None:
            tokens, state = self._views(copy)
        else:
            tokens, state = (np.empty(size, np.uint8) if size else None for size in sizes)
        assert self.disk is not None, "a record that lies nowhere"
        assert self.readers is not None, "a record that lies nowhere"
        ready = self.readers.submit(self.disk.read, record, tokens, state)
        return _Content(record, copy, tokens, state, ready)

    def _memory(self, record: Record, sizes: tuple[int, int]) -> Copy | None:
        copy = self.books.take(sizes, NOTHING)  # where nothing has to go for it
        if copy is None:
            value = self._victims.value(record)
            copy = self.books.take(sizes, value, self._victims, clean=self.books.transit)
        return copy

    def _to_device(self, content: _Content, place: Place) -> None:
        record = content.record
        if content.tokens is not None:
            begin, end = max(record.start, self.start), min(record.end, place.tokens)
            if begin < end:
                slots = slots_of(self.pages, -1, end, self.page_size)[begin:]
                self.mover.load_tokens(slots, content.tokens, begin - record.start, record.length)
        if content.state is not None and isinstance(record, Anchor):
            self.mover.load_state(self.slot, content.state)
        elif record.length == CHUNK_TOKENS and place.tokens >= record.end:
            self.loaded.add(record)

    def _let_go(self) -> None:
        """Waits for the device; what was read from disk is in host memory from now on."""
        self.mover.finish()
        books = self.books
        for content in self.passed:
            copy, record = content.copy, content.record
            if copy is None:
                continue
            with books.lock:
                sound = content.ready is None or content.ready.exception() is None
                if record.host is copy:
                    books.end_transfer(record, copy)
                elif sound and record.attached and record.host is None:
                    record.host = copy
                    books.end_transfer(record, copy)
                else:
                    books.give_back(copy)
        self.passed.clear()

    def _given_up(self, record: Record, error: BadRecord | OSError) -> bool:
        """After it could not be read: whether it is out of the index, and another place can take over."""
        self.ticket.reason = f"a part of it could not be read: {error}"
        assert self.disk is not None, "only files cannot be read"
        if isinstance(error, FileNotFoundError):
            self.disk.vanished()
        elif isinstance(error, OSError):
            return self.disk.unreadable(record, error)
        else:
            self.disk.remove_damaged(record, error)
        return True

    def _used(self, records: list[Record]) -> None:
        now = time.monotonic()
        for record in records:
            record.worth.use(*self.owner, now) if self.owner[0] else self._touch(record, now)
            if self.disk is not None:
                self.disk.touch(record)

    def _touch(self, record: Record, now: float) -> None:
        record.worth.last_used = now
        record.worth.uses += 1

    def _views(self, copy: Copy) -> tuple[Bytes | None, Bytes | None]:
        arena = self.books.arena
        tokens = None if copy.tokens is None else arena.bytes_of(copy.tokens)
        return tokens, None if copy.state is None else arena.bytes_of(copy.state)

    def _sizes(self, record: Record) -> tuple[int, int]:
        shape = self.books.shape
        return record.length * shape.token_bytes, shape.state_bytes if isinstance(record, Anchor) else 0
