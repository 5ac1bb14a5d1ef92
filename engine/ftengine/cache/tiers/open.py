"""From budgets to the tiers below the device, as base.Tiers has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ftengine.cache.sessions import Sessions
from ftengine.cache.tiers.arena import Arena
from ftengine.cache.tiers.books import Books
from ftengine.cache.tiers.disk import DiskTier
from ftengine.cache.tiers.host_and_disk import HostAndDisk
from ftengine.cache.tiers.identity import Identity
from ftengine.cache.tiers.pinning import Pin
from ftengine.cache.tiers.shape import RecordShape
from ftengine.cache.tiers.writer import Pace
from ftengine.core import CacheLayout, CacheTensors

log = logging.getLogger(__name__)

TRANSIT_LEAST = 64 << 20


def transit_bytes(layout: CacheLayout) -> int:
    """Host memory that a disk tier without a host tier takes: two anchors and four chunks on their way."""
    shape = RecordShape.of(layout)
    return max(TRANSIT_LEAST, 2 * shape.largest + 4 * shape.chunk_bytes)


def staging_bytes(layout: CacheLayout) -> int:
    """Device memory that the tiers of a GPU take."""
    return RecordShape.of(layout).chunk_bytes


def open_tiers(
    *,
    tensors: CacheTensors,
    layout: CacheLayout,
    sessions: Sessions,
    host_bytes: int,
    disk_bytes: int,
    folder: Path | None,
    identity: Identity,
    wake: Callable[[], None] = lambda: None,
    pin: Pin | None = None,
    pace: Pace | None = None,
) -> HostAndDisk | None:
    """None where neither tier is wanted or possible; what is not possible is logged once, with its reason.

    host_bytes, disk_bytes: budgets; 0: no such tier. folder: of all identities, for the disk tier.
    wake: called from the tiers' thread whenever a ticket is done.
    pin: makes host memory readable for the GPU by itself (experts/pinned.py); None: copies take the slower way.
    """
    shape = RecordShape.of(layout)
    if not shape.token_bytes and not shape.state_bytes:
        return None
    disk_bytes = disk_bytes if folder is not None else 0
    arena, host_bytes = _arena(host_bytes, disk_bytes, layout)
    if arena is None:
        return None
    books = Books(shape, sessions, arena, transit=not host_bytes)
    disk: DiskTier | None = None
    if disk_bytes and folder is not None:
        try:
            disk = DiskTier(folder, identity, books, disk_bytes)
        except OSError as error:
            log.warning("prompts are not kept on disk: %s: %s", error.filename or folder, error.strerror or error)
            if not host_bytes:
                return None
    tiers = HostAndDisk(books, disk, tensors, host_bytes, wake, pin, pace or Pace())
    tiers.start()
    return tiers


def _arena(host_bytes: int, disk_bytes: int, layout: CacheLayout) -> tuple[Arena | None, int]:
    """And the host tier's budget, 0 if it cannot be had."""
    if host_bytes:
        try:
            return Arena(host_bytes), host_bytes
        except MemoryError as error:
            log.warning("prompts are not kept in host memory: %s", error)
    if disk_bytes:
        try:
            return Arena(transit_bytes(layout)), 0
        except MemoryError as error:
            log.warning("prompts are not kept on disk: %s", error)
    return None, 0
