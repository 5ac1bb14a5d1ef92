"""The tiers below the device as one: what the step loop asks, handed to the index or to the threads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ftengine.cache.tiers.base import Found, Kept, Ticket, TierName, TierSizes
from ftengine.cache.tiers.books import Books, Counts
from ftengine.cache.tiers.disk import DiskTier
from ftengine.cache.tiers.keeping import Keeping
from ftengine.cache.tiers.mover import Mover, make_mover
from ftengine.cache.tiers.pinning import Pin, PinnedWindows
from ftengine.cache.tiers.records import Chunk, Record
from ftengine.cache.tiers.restoring import Restoring
from ftengine.cache.tiers.worker import CLOSED, Worker
from ftengine.cache.tiers.writer import Pace, Writer
from ftengine.core import BoundaryKind, CacheTensors

log = logging.getLogger(__name__)

LOAD_SECONDS = 0.3  # that opening waits for the index of what is on disk; the rest is found as it is read
MOST_READERS = 4
CHECK_SECONDS = 0.05  # for which an integrity check waits for the books


class HostAndDisk:
    """Fulfils base.Tiers. Called from the step loop, but for what its threads do."""

    def __init__(
        self,
        books: Books,
        disk: DiskTier | None,
        tensors: CacheTensors,
        host_bytes: int,
        wake: Callable[[], None],
        pin: Pin | None,
        pace: Pace,
    ) -> None:
        self._books = books
        self._disk = disk
        self._host_bytes = host_bytes
        self._page_size = tensors.page_size
        self._windows = PinnedWindows(books.arena, pin)
        self._worker = Worker(wake, self._catch_up)
        self._writer = None if disk is None else Writer(books, disk, pace, self._worker.nudge)
        self._readers = None if disk is None else ThreadPoolExecutor(_readers(), "prompts-read")
        self._mover: Mover = make_mover(tensors, books.shape, self._windows)
        self._closed = False

    def start(self) -> None:
        self._worker.start()
        if self._writer is not None:
            self._writer.start()
            if self._writer.loaded.wait(LOAD_SECONDS):
                self._report()

    def find(self, tokens: bytes, limit: int, above: int) -> Found | None:
        if self._closed:
            return None
        place = self._books.index.find(tokens, limit, above)
        if place is None:
            return None
        records = place.records(above)
        kind: BoundaryKind | None = place.kind if self._books.index.stateful else None
        # Without a host tier what lies in memory is on its way to the disk, or was read from it for another request.
        tier = place.tier(above) if self._host_bytes else "disk"
        return Found(place.tokens, tier, kind, place, sum(record.worth.bytes for record in records))

    def restore(
        self,
        found: Found,
        tokens: bytes,
        start: int,
        pages: list[int],
        slot: int,
        session: str = "",
        side: bool = False,
        turn: int = 0,
    ) -> Ticket:
        ticket = Ticket()
        if self._closed:
            ticket.reason, ticket.done = CLOSED, True
            return ticket
        owner = (session, side, turn)
        job = Restoring(
            found,
            tokens,
            start,
            list(pages),
            slot,
            owner,
            ticket,
            self._mover.mark(),
            self._books,
            self._mover,
            self._disk,
            self._readers,
            self._page_size,
        )
        self._worker.put(job)
        return ticket

    def keep(self, kept: Kept) -> Ticket | None:
        if self._closed or not kept.tokens:
            return None
        ticket = Ticket()
        mark = self._mover.mark()
        self._worker.put(Keeping(kept, ticket, mark, self._books, self._mover, self._writer, self._page_size))
        return ticket

    def forget(self, tokens: bytes) -> None:
        gone = self._books.forget(tokens)
        if self._disk is not None and gone:
            self._disk.doom(gone)
            self._worker.put(self._disk.bury)

    def sizes(self) -> list[TierSizes]:
        books = self._books
        found: list[TierSizes] = []
        records = list(books.index.by_key.values())
        if self._host_bytes:
            there = [record for record in records if record.host is not None]
            details: dict[str, Any] = {"pinned_bytes": self._windows.nbytes, "moved_bytes": books.arena.moved}
            found.append(self._size("host", self._host_bytes, books.arena.used, there, books.host, details))
        if self._disk is not None and self._writer is not None:
            there = [record for record in records if record.disk]
            details = {
                "unwritten": len(books.unwritten),
                "superseded": books.superseded,
                "paused": self._writer.failing,
                "transit_bytes": books.arena.used if books.transit else 0,
            }
            found.append(self._size("disk", self._disk.budget, self._disk.used, there, books.disk, details))
        return found

    def rest(self, idle: bool) -> None:
        self._windows.busy = not idle
        if idle and self._windows.behind:
            self._worker.nudge()

    def _catch_up(self) -> bool:
        """Pins what was put off, a window. Whether there is more to be done now."""
        self._windows.catch_up()
        return self._windows.behind and not self._windows.busy

    def check_integrity(self) -> None:
        """Also with work under way; what is just being moved is then left out."""
        if not self._books.lock.acquire(timeout=CHECK_SECONDS):
            return  # the books are being worked on: the next idle moment will do
        try:
            self._books.check()
        finally:
            self._books.lock.release()

    @property
    def idle(self) -> bool:
        """Nothing is being restored or kept; writes to the disk may wait."""
        return self._worker.idle

    def close(self, seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + seconds
        self._worker.close(seconds / 2)
        if self._writer is not None and self._disk is not None:
            self._writer.flush(max(0.0, end - time.monotonic()))
            if self._writer.ended:
                self._disk.close()
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
        if self._worker.ended:
            self._mover.close()
            self._windows.close()

    def _report(self) -> None:
        assert self._disk is not None, "there is a writer only for a disk tier"
        records = [record for record in self._books.index.by_key.values() if record.disk]
        if records:
            size = self._books.disk_used / (1 << 30)
            log.info("%d records of prompts, %.2f GiB, found in %s", len(records), size, self._disk.path)

    @staticmethod
    def _size(
        name: TierName,
        budget: int,
        used: int,
        records: list[Record],
        counts: Counts,
        details: dict[str, Any] | None = None,
    ) -> TierSizes:
        chunks = sum(isinstance(record, Chunk) for record in records)
        return TierSizes(
            name,
            budget,
            used,
            chunks,
            len(records) - chunks,
            counts.evictions,
            counts.written,
            counts.read,
            counts.failures,
            details or {},
        )


def _readers() -> int:
    """Threads that read and check files: half of the processors, the others may be computing."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(1, min(MOST_READERS, allowed // 2))
