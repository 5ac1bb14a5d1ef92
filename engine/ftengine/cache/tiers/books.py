"""The one account of both tiers: which records there are, where they lie, what goes when room is short.

A chunk is worth as much as the best of what hangs on it, so it goes after that. What is worth no less than the newcomer
stays, and the newcomer is left out. Torch-free; every method takes the lock by itself unless it says that it is held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ftengine.cache.sessions import Sessions
from ftengine.cache.tiers.arena import Arena
from ftengine.cache.tiers.base import CHUNK_TOKENS
from ftengine.cache.tiers.hashing import common_tokens
from ftengine.cache.tiers.index import Index, check_tree, subtree
from ftengine.cache.tiers.records import Anchor, Chunk, Copy, Record
from ftengine.cache.tiers.shape import RecordShape
from ftengine.cache.value import rank

Value = tuple[int, float]
NOTHING: Value = (-1, 0.0)  # of a chunk on which no anchor hangs
EVERYTHING: Value = (1 << 30, 0.0)
TIGHT = 0.75  # of the arena in use: from there on records make way for each other soon
BREATH_SECONDS, BREATH_EVERY = 5e-5, 64  # pauses in long loops, for the step loop to get the interpreter


@dataclass
class Counts:
    """Since start, of one tier."""

    evictions: int = 0
    written: int = 0  # bytes
    read: int = 0
    failures: int = 0


class Books:
    """arena: of the host tier; without one it only holds what waits for the disk or has just been read from it."""

    def __init__(self, shape: RecordShape, sessions: Sessions, arena: Arena, *, transit: bool) -> None:
        self.shape = shape
        self.sessions = sessions
        self.arena = arena
        self.transit = transit
        self.index = Index(shape)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # something is to be written
        self.unwritten: dict[Record, None] = {}  # the oldest first
        self.disk_used = 0  # bytes of this index's files
        self.host, self.disk = Counts(), Counts()
        self.epoch = 0  # grows with every `forget`: what was asked for before it is void
        self.superseded = 0  # anchors that were not written because a later one came first
        self.unlink: Callable[[Record], None] = lambda record: None  # removes a record's file

    # What is there

    def attach(self, record: Record, copy: Copy | None, *, write: bool) -> None:
        """A record that was just filled, or found on disk (copy is None then). Its parent is there."""
        with self.lock:
            if copy is not None:
                record.host = copy
                self.host.written += record.worth.bytes
            self.index.attach(record)
            self.disk_used += record.disk
            if write:
                self.want(record)

    def want(self, record: Record) -> None:
        """It is in host memory and to be written, unless it was already."""
        with self.lock:
            if record.host is not None and not record.disk:
                record.unwritten = True
                self.unwritten[record] = None
                self.changed.notify_all()

    def written(self, record: Record, size: int) -> None:
        with self.lock:
            self.settle(record)
            self.disk_used += size - record.disk
            record.disk = size
            if not record.attached:  # it went while it was written
                self._forget_file(record)

    def settle(self, record: Record) -> None:
        """It is not to be written any more."""
        with self.lock:
            record.unwritten = False
            self.unwritten.pop(record, None)

    def hold(self, records: list[Record], by: int) -> None:
        """by: 1: none of them, all being part of one path, leaves the index before it is held by -1 again."""
        with self.lock:
            for record in records:
                record.holds += by
                if not record.holds and record.attached and self.index.covered(record):
                    self.drop(record)

    @property
    def tight(self) -> bool:
        """Whether what lies in host memory alone may soon have to go."""
        return self.transit or self.arena.used > TIGHT * self.arena.size

    # What goes

    def drop_host(self, record: Record) -> None:
        with self.lock:
            copy, record.host = record.host, None
            for block in copy.blocks() if copy is not None else ():
                self.arena.free(block)
            self._leave(record)

    def drop_disk(self, record: Record) -> None:
        with self.lock:
            self._forget_file(record)
            self._leave(record)

    def drop(self, record: Record) -> None:
        """With everything below it: it turned out to be damaged, or is of no use any more."""
        with self.lock:
            if record.attached:
                for each in self.index.detach(record):
                    self._clear(each)

    def forget(self, tokens: bytes) -> list[Record]:
        """Everything whose path begins as this one does, were it by one token: what is wrong may have been shared.
        Returns those that have files, which the caller removes."""
        with self.lock:
            self.epoch += 1
            gone: list[Record] = []
            for record in self.index.root.below():
                if common_tokens(record.tokens, tokens) or not record.tokens:
                    gone += self.index.detach(record)
            files = [each for each in gone if each.disk]
            for each in gone:
                self._clear(each, unlink=False)
            return files

    def _leave(self, record: Record) -> None:
        """Held: the lock. What lies nowhere is of no use, nor is what hangs on it."""
        if not record.present and record.attached:
            for each in self.index.detach(record):
                self._clear(each)

    def _clear(self, record: Record, *, unlink: bool = True) -> None:
        """Held: the lock. A copy that a transfer uses is freed by who ends it: see `end_transfer`."""
        self.settle(record)
        self._forget_file(record, unlink=unlink)
        if record.host is not None and not record.host.held:
            for block in record.host.blocks():
                self.arena.free(block)
            record.host = None

    def _forget_file(self, record: Record, *, unlink: bool = True) -> None:
        if record.disk:
            self.disk_used -= record.disk
            record.disk = 0
            if unlink:
                self.unlink(record)

    def begin_transfer(self, record: Record) -> Copy | None:
        """Its copy in host memory, which stays where it is until `end_transfer`."""
        with self.lock:
            if record.host is not None:
                record.host.hold(1)
            return record.host

    def end_transfer(self, record: Record, copy: Copy) -> None:
        with self.lock:
            copy.hold(-1)
            if not record.attached and record.host is copy and not copy.held:
                record.host = None
                for block in copy.blocks():
                    self.arena.free(block)

    # What it is worth

    def values(self, now: float) -> dict[Record, Value]:
        """Held: the lock."""
        order = list(subtree(self.index.root))
        found: dict[Record, Value] = {}
        for number, record in enumerate(reversed(order)):
            own = isinstance(record, Anchor) or not self.index.stateful
            value = rank(record.worth, self.sessions, now) if own else NOTHING
            found[record] = max(value, found.get(record, value))
            if record.parent is not None:
                found[record.parent] = max(found[record], found.get(record.parent, NOTHING))
            if number % BREATH_EVERY == BREATH_EVERY - 1:
                time.sleep(BREATH_SECONDS)
        return found

    def victims(self) -> Victims:
        return Victims(self)

    def take(
        self, sizes: tuple[int, int], value: Value, victims: Victims | None = None, *, clean: bool = False
    ) -> Copy | None:
        """Memory for a record with so many bytes of tokens and of state; None: there is none for something of that
        value. Others go for it, those first that are not waiting for the disk; none without `victims`.

        clean: what is on disk, too, may go whatever it is worth: the newcomer is on its way there.
        """
        wanted = [size for size in sizes if size]
        with self.lock:
            blocks = self.arena.allocate_all(wanted)
            going = () if victims is None else victims.of_host(value, unwritten=not self.transit, clean=clean)
            for record in going:
                if blocks is not None:
                    break
                self.drop_host(record)
                self.host.evictions += 1
                blocks = self.arena.allocate_all(wanted)
            if blocks is None:
                return None
            rest = iter(blocks)
            copy = Copy(next(rest) if sizes[0] else None, next(rest) if sizes[1] else None)
            copy.hold(1)
            return copy

    def give_back(self, copy: Copy) -> None:
        """What `take` gave and no record was made of."""
        with self.lock:
            copy.hold(-1)
            for block in copy.blocks():
                self.arena.free(block)

    # Whether it is right

    def check(self) -> None:
        """Held: the lock. Raises AssertionError."""
        self.arena.check()
        check_tree(self.index)
        records = list(self.index.by_key.values())
        blocks = [block for record in records if record.host is not None for block in record.host.blocks()]
        assert len({id(block) for block in blocks}) == len(blocks), "a block has two owners"
        assert sum(block.extent for block in blocks) <= self.arena.used, "host memory is counted wrongly"
        assert self.disk_used == sum(record.disk for record in records), "disk space is counted wrongly"
        for record in self.unwritten:
            assert record.unwritten, "a record that is not to be written waits for the disk"
            assert record.host is not None, "a record that is gone waits for the disk"
        if self.index.stateful:
            for record in records:
                size = record.worth.bytes
                own = self.shape.state_bytes if isinstance(record, Anchor) else 0
                assert size == record.length * self.shape.token_bytes + own, "a record has another size"
                assert isinstance(record, Chunk) == (record.length == CHUNK_TOKENS), "a record of the wrong kind"


class Victims:
    """What may go, the least worth first. Found out when it is first asked for, and then good for several newcomers, so
    an entry may be gone already."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._values: dict[Record, Value] | None = None
        self._order: list[Record] = []

    def value(self, record: Record) -> Value:
        """What is not known yet is worth everything."""
        return self._known().get(record, EVERYTHING)

    def renew(self) -> None:
        self._values = None

    def of_host(self, below: Value, *, unwritten: bool, clean: bool) -> Iterator[Record]:
        yield from (record for record in self._worth_less(below) if self._may_go(record, False))
        if clean:
            yield from (record for record in self._all() if record.disk and self._may_go(record, False))
        if unwritten:
            yield from (record for record in self._worth_less(below) if self._may_go(record, True))

    def _may_go(self, record: Record, waiting: bool) -> bool:
        copy = record.host
        if copy is None or copy.held or not record.attached or record.unwritten != waiting:
            return False
        return not record.holds or record.disk > 0

    def of_disk(self, below: Value) -> Iterator[Record]:
        for record in self._worth_less(below):
            if record.attached and record.disk and not record.holds and (record.host is None or not record.host.held):
                yield record

    def _worth_less(self, below: Value) -> Iterator[Record]:
        values = self._known()
        for record in self._order:
            if values[record] >= below:
                return
            yield record

    def _all(self) -> list[Record]:
        self._known()
        return self._order

    def _known(self) -> dict[Record, Value]:
        if self._values is None:
            with self._books.lock:
                values = self._books.values(time.monotonic())
            del values[self._books.index.root]
            key = [(value, -record.end, isinstance(record, Chunk)) for record, value in values.items()]
            order = sorted(zip(key, range(len(key)), values, strict=True))
            self._order = [record for _, _, record in order]
            self._values = values
        return self._values
