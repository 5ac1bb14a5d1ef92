"""Bytes from a source into the work folder: several connections write, one thread hashes behind them.

A file is asked for in spans of at most 64 MiB, in order, so that the hash follows the arriving bytes through the page
cache and is known when the last one is there. A file whose hash does not fit, or that changed under way, is fetched
anew, once. What is complete lies in the work folder under the name of its content.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from ftlaunch.store.events import Complete, Moved, Observer, Said
from ftlaunch.store.folder import Folder
from ftlaunch.store.hub.connection import Connections
from ftlaunch.store.hub.digest import Digest
from ftlaunch.store.hub.errors import HubError, Passing
from ftlaunch.store.hub.limits import BLOCK, CHUNK, SPAN
from ftlaunch.store.hub.part import Part, write_all
from ftlaunch.store.hub.patience import Patience
from ftlaunch.store.hub.ranges import Body, Changed, Ranges, Source
from ftlaunch.store.hub.repository import RemoteFile

TICK = 0.2  # seconds between two events about progress
EARLY_SYNC = 64 << 20  # hashed bytes between two requests to bring them to the disk, so that little is left at the end


class Stopped(Exception):
    """The transfer ends; nobody waits for this thread's work."""


@dataclass
class Item:
    """One content to fetch. part: what it is written to; another object after the file was begun anew."""

    file: RemoteFile
    part: Part
    moved: int = 0  # bytes, for display
    begun_anew: int = 0
    sha256: str = ""  # when complete


@dataclass
class Span:
    item: Item
    part: Part
    position: int
    end: int


class Transfer:
    def __init__(self, source: Source, work: Folder, files: Sequence[RemoteFile], observe: Observer, step: str) -> None:
        """step: what a person types to go on after an error."""
        self._source = source
        self._work = work
        self._limits = source.limits
        self._observe = observe
        self._step = step
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._news: deque[Said | Complete] = deque()
        self._connections: list[Connections] = []
        self._parts = ExitStack()
        self._files = files
        self._items: list[Item] = []
        self._spans: deque[Span] = deque()
        self._told = 0.0  # when progress was told last

    def _item(self, file: RemoteFile) -> Item:
        part = Part(self._work, file.key, file.size)
        self._parts.callback(part.close)
        return Item(file, part, moved=part.present())

    def run(self) -> dict[str, str]:
        """Fetch all. Returns the SHA-256 of each file by its key. Raises HubError, or OSError of the disk."""
        self._items += map(self._item, self._files)
        threads = [threading.Thread(target=self._guarded, args=(self._hash_all,), name="hash")]
        for item in self._items:
            self._enqueue(item)
        threads += [
            threading.Thread(target=self._guarded, args=(self._fetch_all,), name=f"fetch-{number}")
            for number in range(min(self._limits.connections, sum(item.part.count for item in self._items)))
        ]
        try:
            for thread in threads:
                thread.start()
            self._watch()
        finally:
            self._end(threads)
        if self._failure is not None:
            raise self._failure
        self._tell()
        return {item.file.key: item.sha256 for item in self._items}

    def close(self) -> None:
        self._parts.close()

    def _enqueue(self, item: Item) -> None:
        """Spans small enough that every connection has several: the last ones then end at about the same time."""
        remaining = sum(other.file.size for other in self._items)
        share = remaining // (4 * self._limits.connections) // BLOCK * BLOCK
        spans = [Span(item, item.part, start, end) for start, end in item.part.missing(max(BLOCK, min(SPAN, share)))]
        self._spans.extend(spans)

    def _watch(self) -> None:
        """In the caller's thread, which is the one that Ctrl-C interrupts and that may write to a terminal."""
        while not self._stop.is_set() and not all(item.sha256 for item in self._items):
            self._tell()
            with self._changed:
                self._changed.wait(TICK)

    def _tell(self) -> None:
        while self._news:
            self._observe(self._news.popleft())
        now = time.monotonic()
        if now - self._told >= TICK or all(item.sha256 for item in self._items):
            self._told = now
            under_way = {i.file.path: (i.moved, i.file.size) for i in self._items if i.moved and not i.sha256}
            done, total = sum(item.moved for item in self._items), sum(item.file.size for item in self._items)
            self._observe(Moved(under_way, min(done, total), total))

    def _end(self, threads: list[threading.Thread]) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        for connections in self._connections:
            connections.interrupt()
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def _guarded(self, work: object) -> None:
        assert callable(work)
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            with self._changed:
                if self._failure is None and not self._stop.is_set():
                    self._failure = error
                self._stop.set()
                self._changed.notify_all()

    # Fetching

    def _fetch_all(self) -> None:
        with closing(Connections(self._limits.timeout)) as connections:
            self._connections.append(connections)
            ranges = Ranges(self._source, connections)
            while (span := self._next()) is not None:
                self._fetch(ranges, span)

    def _next(self) -> Span | None:
        """The next span; waits while none is left but a file may still have to be fetched anew."""
        with self._changed:
            while not self._stop.is_set():
                if self._spans:
                    return self._spans.popleft()
                if all(item.sha256 for item in self._items):
                    return None
                self._changed.wait()
        return None

    def _fetch(self, ranges: Ranges, span: Span) -> None:
        patience = Patience(self._limits, span.item.file.path, self._say, self._sleep, self._step)
        while span.position < span.end and span.part is span.item.part:
            before = span.position // BLOCK
            try:
                with ranges.open(span.item.file, span.position, span.end) as body:
                    self._receive(body, span)
            except Passing as trouble:
                if self._stop.is_set():
                    raise Stopped from None
                if isinstance(trouble, Changed) and not span.item.begun_anew:
                    self._begin_anew(span.item, span.part, str(trouble))
                    return
                if span.position // BLOCK > before:
                    patience.progress()
                if span.end == span.item.file.size <= BLOCK:  # a server that knows no ranges still serves it whole
                    self._count(span.item, -span.position)
                    span.position = 0
                patience.after(trouble)

    def _receive(self, body: Body, span: Span) -> None:
        while body.left:
            data = body.read(CHUNK)
            if self._stop.is_set():
                raise Stopped
            if span.part is not span.item.part:
                return
            write_all(span.part.fd, data, span.position)
            self._advance(span, len(data))

    def _advance(self, span: Span, count: int) -> None:
        first = span.position // BLOCK
        span.position += count
        at_end = span.position == span.part.size
        last = -(-span.position // BLOCK) if at_end else span.position // BLOCK
        for block in range(first, last):
            span.part.mark(block)
        with self._changed:
            span.item.moved += count
            if last > first:
                self._changed.notify_all()

    def _count(self, item: Item, moved: int) -> None:
        with self._changed:
            item.moved += moved

    def _begin_anew(self, item: Item, part: Part, why: str) -> None:
        """Throw away what has arrived in `part`. Raises HubError when that was done before."""
        with self._changed:
            if item.part is not part:
                return  # another thread was first
            part.discard()
            if item.begun_anew:
                raise HubError(f"{item.file.path}: {why}, again after it was fetched anew", self._step)
            self._source.forget(item.file)
            item.part = Part(self._work, item.file.key, item.file.size)
            self._parts.callback(item.part.close)
            item.begun_anew += 1
            item.moved = 0
            self._enqueue(item)
            self._changed.notify_all()
        self._say(f"{item.file.path}: {why}; it is fetched anew")

    # Hashing

    def _hash_all(self) -> None:
        settle = threading.Semaphore(1)
        for item in self._items:
            while not item.sha256:
                self._hash(item, settle)

    def _hash(self, item: Item, settle: threading.Semaphore) -> None:
        """Hash one file as it arrives; complete it, or begin it anew."""
        part, digest, buffer = item.part, Digest(item.file), memoryview(bytearray(min(BLOCK, item.file.size)))
        for block in range(part.count):
            self._await(item, part, block)
            if item.part is not part:
                return
            length = min(BLOCK, part.size - block * BLOCK)
            if os.preadv(part.fd, [buffer[:length]], block * BLOCK) != length:
                raise OSError(5, "a block just written cannot be read back", item.file.path)
            digest.update(buffer[:length])
            if (block + 1) * BLOCK % EARLY_SYNC == 0 and settle.acquire(blocking=False):
                threading.Thread(target=self._settle, args=(part, settle), name="settle").start()
        with settle:  # its descriptor is not synced by two threads at once
            pass
        if not digest.fits():
            self._begin_anew(item, part, "its content does not fit the hash that the Hub announces")
            return
        part.complete()
        with self._changed:
            item.sha256 = digest.sha256
            self._news.append(Complete(item.file.path, item.sha256))
            self._changed.notify_all()

    def _await(self, item: Item, part: Part, block: int) -> None:
        if part.has(block):
            return
        with self._changed:
            self._changed.wait_for(lambda: part.has(block) or item.part is not part or self._stop.is_set())
        if self._stop.is_set():
            raise Stopped

    def _settle(self, part: Part, settle: threading.Semaphore) -> None:
        try:
            self._guarded(lambda: os.fdatasync(part.fd) if hasattr(os, "fdatasync") else os.fsync(part.fd))
        finally:
            settle.release()

    def _say(self, text: str) -> None:
        self._news.append(Said(text))

    def _sleep(self, wait: float) -> None:
        if self._stop.wait(wait):
            raise Stopped
