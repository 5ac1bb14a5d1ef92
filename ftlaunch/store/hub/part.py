"""A file on its way: its bytes, and a journal of the blocks that have arrived.

`<key>.part` has the file's full size, with holes. `<key>.blocks` begins with the size and holds one byte a block, set
after the block's bytes were written: whoever kills this process finds both in the page cache. What a power cut makes
of them is found by the hash at the end.
"""

from __future__ import annotations

import os
import struct

from ftlaunch.store.folder import Folder
from ftlaunch.store.hub.limits import BLOCK

HEADER = struct.Struct("<8sQ")
MAGIC = b"ftpart01"


class Part:
    def __init__(self, work: Folder, key: str, size: int) -> None:
        self.size = size
        self.count = -(-size // BLOCK)  # of blocks
        self._work = work
        self._key = key
        self.fd, self._journal, self._done = _resumed(work, key, size) or self._fresh()

    def _fresh(self) -> tuple[int, int, bytearray]:
        self.discard()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        fd = self._work.open(f"{self._key}.part", flags)
        os.ftruncate(fd, self.size)
        journal = self._work.open(f"{self._key}.blocks", flags)
        write_all(journal, HEADER.pack(MAGIC, self.size) + bytes(self.count), 0)
        return fd, journal, bytearray(self.count)

    def has(self, block: int) -> bool:
        return self._done[block] == 1

    def present(self) -> int:
        """Bytes that have arrived."""
        return _bytes(self._done, self.size)

    def missing(self, most: int) -> list[tuple[int, int]]:
        """Ranges (start, end) of bytes to fetch, in order, each at most `most` bytes long, a multiple of BLOCK."""
        ranges: list[tuple[int, int]] = []
        for block in range(self.count):
            if self._done[block]:
                continue
            start, end = block * BLOCK, min(self.size, (block + 1) * BLOCK)
            if ranges and ranges[-1][1] == start and end - ranges[-1][0] <= most:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
        return ranges

    def mark(self, block: int) -> None:
        """Its bytes are written."""
        write_all(self._journal, b"\1", HEADER.size + block)
        self._done[block] = 1

    def complete(self) -> None:
        """Put the bytes on the disk under the name of their content."""
        os.fsync(self.fd)
        self._work.rename(f"{self._key}.part", self._work, self._key)
        self._work.remove(f"{self._key}.blocks")
        self._work.sync()

    def discard(self) -> None:
        """Forget what has arrived. Open descriptors stay: a thread that still writes must not hit another file."""
        self._work.remove(f"{self._key}.blocks")
        self._work.remove(f"{self._key}.part")

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._journal)


def arrived(work: Folder, key: str, size: int) -> int:
    """Bytes of a file that an earlier pull has left. Makes nothing."""
    found = _resumed(work, key, size)
    if found is None:
        return 0
    os.close(found[0])
    os.close(found[1])
    return _bytes(found[2], size)


def _resumed(work: Folder, key: str, size: int) -> tuple[int, int, bytearray] | None:
    """Descriptors of the file and its journal, and the journal's content, if they fit each other."""
    if work.size(f"{key}.part") != size:
        return None
    try:
        journal = work.open(f"{key}.blocks", os.O_RDWR)
    except OSError:  # none, or something else in its place
        return None
    count = -(-size // BLOCK)
    head, done = os.pread(journal, HEADER.size, 0), bytearray(os.pread(journal, count + 1, HEADER.size))
    if head == HEADER.pack(MAGIC, size) and len(done) == count and set(done) <= {0, 1}:
        try:
            return work.open(f"{key}.part", os.O_RDWR), journal, done
        except OSError:
            pass
    os.close(journal)
    return None


def _bytes(done: bytearray, size: int) -> int:
    """The last block may be a short one."""
    short = -size % BLOCK if done and done[-1] else 0
    return sum(done) * BLOCK - short


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
