"""Keeping a path: what is not below yet is copied from the device, chunk by chunk, then its anchor."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from ftengine.cache.tiers.base import CHUNK_TOKENS, TOKEN_BYTES, Kept, Ticket
from ftengine.cache.tiers.books import NOTHING, Books, Value
from ftengine.cache.tiers.hashing import CHUNK_BYTES, anchor_key, chunk_key
from ftengine.cache.tiers.mover import Mover, Slots, slots_of
from ftengine.cache.tiers.records import Anchor, Chunk, Copy, Record
from ftengine.cache.tiers.spread import spread
from ftengine.cache.tiers.writer import Writer
from ftengine.cache.value import Worth, rank
from ftengine.core import BoundaryKind

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that a path may wait for memory that the disk writer frees
LASTING = (BoundaryKind.SYSTEM, BoundaryKind.LAST_USER, BoundaryKind.QUESTION_END)
ENDS = (BoundaryKind.PROMPT_END, BoundaryKind.ANSWER_END)


@dataclass(eq=False)
class Keeping:
    """One path being copied. `steps` does a record at a time and yields in between: True if it waits for memory."""

    kept: Kept
    ticket: Ticket
    mark: Any
    books: Books
    mover: Mover
    writer: Writer | None
    page_size: int
    held: list[Record] = field(default_factory=list)

    _saved: int = 0
    _value: Value = NOTHING

    def __post_init__(self) -> None:
        self._victims = self.books.victims()
        self._epoch = self.books.epoch

    @property
    def _written(self) -> bool:
        """Side requests' paths are short or soon over, but a sub-agent's tools and system text come again."""
        return self.writer is not None and (not self.kept.side or self.kept.kind is BoundaryKind.SYSTEM)

    def steps(self) -> Generator[bool, None, None]:
        try:
            yield from self._copy()
        finally:
            self.books.hold(self.held, -1)

    def _copy(self) -> Iterator[bool]:
        kept, books = self.kept, self.books
        if books.transit and not self._written:
            self.ticket.reason = "there is no host tier, and it is not worth the disk"
            return
        now = time.monotonic()
        with books.lock:
            path = books.index.walk(kept.tokens)
            self._hold(path)
        missing = range(len(path), len(kept.tokens) // CHUNK_BYTES)
        self._use(path, now)
        parent = path[-1] if path else books.index.root
        tail = kept.tokens[CHUNK_BYTES * (len(kept.tokens) // CHUNK_BYTES) :]
        anchor = parent.anchors.get(tail) if not missing else None
        needs_anchor = anchor is None and (books.index.stateful or bool(tail))
        if anchor is not None:
            self._use([anchor], now)
        if needs_anchor and not missing and not books.index.stateful:
            needs_anchor = not books.index.contains(parent, tail)
        if not missing and not needs_anchor:
            return
        position = len(kept.tokens) // TOKEN_BYTES
        slots = slots_of(kept.pages, kept.companion, position, self.page_size)
        self.mover.begin(self.mark)
        self._price(position, now)
        for number in missing:
            tokens = kept.tokens[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            copy = yield from self._memory((books.shape.chunk_bytes, 0))
            chunk = None if copy is None else self._chunk(parent, tokens, copy, slots, now)
            if chunk is None:
                return
            parent = chunk
            yield False
        if needs_anchor:
            sizes = (len(tail) // TOKEN_BYTES * books.shape.token_bytes, books.shape.state_bytes)
            copy = yield from self._memory(sizes)
            if copy is not None:
                self._anchor(parent, tail, copy, slots, now)

    def _price(self, position: int, now: float) -> None:
        """What the path's new records are worth, and what is worth less."""
        shape = self.books.shape
        if self.books.index.stateful:
            self._saved = position - self._reached(position)
            worth = self._worth(position, self._saved, shape.state_bytes, now)
        else:
            worth = self._worth(position, CHUNK_TOKENS, shape.chunk_bytes, now)
        self._value = rank(worth, self.books.sessions, now)

    def _memory(self, sizes: tuple[int, int]) -> Generator[bool, None, Copy | None]:
        """None: there is none, and the ticket says so."""
        end = time.monotonic() + PATIENCE
        writer = self.writer if self._written else None
        try:
            while True:
                through = writer is not None and not writer.paused
                copy = self.books.take(sizes, self._value, self._victims, clean=through)
                if copy is not None:
                    return copy
                late = self.ticket.unwanted or time.monotonic() > end
                if late or writer is None or not through or not self.books.unwritten:
                    self.ticket.reason = "there is no room for it in host memory"
                    return None
                writer.press(True)
                yield True
                self._victims.renew()
        finally:
            if writer is not None:
                writer.press(False)

    def _chunk(self, parent: Chunk, tokens: bytes, copy: Copy, slots: Slots, now: float) -> Chunk | None:
        books, begin = self.books, parent.end
        if copy.tokens is not None:
            self.mover.save_tokens(slots[begin : begin + CHUNK_TOKENS], books.arena.bytes_of(copy.tokens))
            self.mover.finish()
        worth = self._worth(begin + CHUNK_TOKENS, CHUNK_TOKENS, books.shape.chunk_bytes, now)
        chunk = Chunk(chunk_key(parent.key, tokens), parent, tokens, worth)
        return chunk if self._attach(chunk, copy) else None

    def _anchor(self, parent: Chunk, tail: bytes, copy: Copy, slots: Slots, now: float) -> None:
        books = self.books
        if copy.tokens is not None:
            self.mover.save_tokens(slots[parent.end :], books.arena.bytes_of(copy.tokens))
        if copy.state is not None:
            self.mover.save_state(self.kept.slot, books.arena.bytes_of(copy.state))
        self.mover.finish()
        position = len(self.kept.tokens) // TOKEN_BYTES
        size = sum(block.size for block in copy.blocks())
        saved = self._saved if books.index.stateful else len(tail) // TOKEN_BYTES
        worth = self._worth(position, saved, size, now)
        anchor = Anchor(anchor_key(parent.key, tail), parent, tail, worth, born=now)
        anchor.lasting = self._lasts(anchor)
        self._attach(anchor, copy)

    def _attach(self, record: Record, copy: Copy) -> bool:
        """False if what it hangs on is gone: a part of it turned out to be damaged."""
        books, parent = self.books, record.parent
        with books.lock:
            void = self._epoch != books.epoch
            if void or parent is None or not parent.attached or record.key in books.index.by_key:
                books.give_back(copy)
                self.ticket.reason = "what comes before it is gone"
                return False
            books.attach(record, copy, write=self._written)
            books.end_transfer(record, copy)
            self._hold([record])
            self._supersede(record)
        return True

    def _supersede(self, record: Record) -> None:
        """Held: the lock. What was to be written and is followed by this is not; what this contains goes."""
        books = self.books
        if not books.index.stateful:
            assert record.parent is not None, "the root follows nothing"
            for other in list(record.parent.anchors.values()):
                if not other.holds and books.index.covered(other):
                    books.drop(other)
        elif isinstance(record, Anchor):
            if self._written:
                spread(books, record, self.kept.tokens)
            own = {chunk.parent: chunk.tokens for chunk in record.path()} | {record.parent: record.tokens}
            for waiting in [each for each in books.unwritten if isinstance(each, Anchor)]:
                follows = own.get(waiting.parent, b"").startswith(waiting.tokens) and waiting.parent in own
                stays = waiting is record or waiting.lasting or waiting.between
                if stays or not follows or waiting.worth.session != self.kept.session:
                    continue
                books.settle(waiting)
                books.superseded += 1
                if books.transit and not waiting.disk and not waiting.holds:
                    books.drop_host(waiting)

    def _use(self, records: list[Any], now: float) -> None:
        """Records that are there already: this session's path leads over them, too."""
        kept, turn = self.kept, self._turn()
        for record in records:
            worth: Worth = record.worth
            if worth.side or not kept.side:
                worth.session, worth.side, worth.turn = kept.session, kept.side, turn
            worth.last_used = now

    def _worth(self, position: int, saved: int, size: int, now: float) -> Worth:
        kept = self.kept
        return Worth(kept.kind, kept.session, kept.side, now, 0, saved, size, position, self._turn())

    def _turn(self) -> int:
        return self.kept.turn or max(0, self.books.sessions.turn(self.kept.session))

    def _lasts(self, anchor: Anchor) -> bool:
        """The end of a prompt only if the path has that of no earlier prompt or answer on it."""
        if self.kept.kind in LASTING:
            return True
        before = self.books.index.along(self.kept.tokens, anchor)
        return self.kept.kind is BoundaryKind.PROMPT_END and all(each.worth.kind not in ENDS for each in before)

    def _reached(self, position: int) -> int:
        """Where a restore would get to without this anchor."""
        place = self.books.index.find(self.kept.tokens, position - 1, 0)
        return 0 if place is None else place.tokens

    def _hold(self, records: list[Any]) -> None:
        self.books.hold(records, 1)
        self.held += records
