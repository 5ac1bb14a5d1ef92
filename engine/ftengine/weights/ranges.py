"""Reads byte ranges of files with several threads: past the page cache where that is faster, else through it.

Torch-free. What the page cache holds of a range is copied out of it. The rest is read with O_DIRECT where the file
system takes that: the bytes then cross memory once less, and what other programs have cached stays. Elsewhere (tmpfs,
network file systems, macOS) reads are ordinary ones.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftengine.errors import CheckpointError
from ftengine.weights.files import open_regular

Bytes = NDArray[np.uint8]

PAGE = 4096  # what direct I/O wants offsets, lengths and addresses to be multiples of, on every disk in use
CHUNK_BYTES = 4 << 20  # of one system call
MIN_DIRECT_BYTES = 128 << 10  # of a range: for less the kernel's reading ahead is worth more
# Enough requests in flight to keep an NVMe disk busy also on two cores: the threads wait, they do not compute.
MIN_THREADS, MAX_THREADS = 4, 16

NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # preadv2: only what needs no waiting for the disk
DIRECT: int = getattr(os, "O_DIRECT", 0)

_local = threading.local()


def aligned_bytes(size: int) -> Bytes:
    """Zeroed memory that begins at a page, as direct I/O wants it; in large pages where the system gives them.

    Raises MemoryError.
    """
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system gives no {size} bytes: {error.strerror}") from None
    if size >= CHUNK_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return np.frombuffer(memory, np.uint8, size)


class RangeFile:
    """A regular file that is open for reading. Safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        self.direct = _open_direct(path, self._descriptor)
        self._seen = self._state()

    def close(self) -> None:
        os.close(self._descriptor)
        if self.direct is not None:
            os.close(self.direct)

    def read(self, offset: int, out: Bytes, step: int = CHUNK_BYTES) -> int:
        """Fills `out`, contiguous, with the bytes from `offset` on, and returns how many there were.

        step: bytes of one system call. Raises CheckpointError when the disk fails.
        """
        done = 0
        try:
            for at in range(0, out.size, step):
                chunk = out[at : at + step]
                count = self._read_chunk(offset + at, chunk, out.size >= MIN_DIRECT_BYTES)
                done += count
                if count < chunk.size:
                    break
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}", "ft verify") from None
        return done

    def changed(self) -> bool:
        """Whether somebody wrote to the file since it was opened."""
        return self._state() != self._seen

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _read_chunk(self, offset: int, out: Bytes, large: bool) -> int:
        done = 0
        if self.direct is not None and large:
            done = _read_cached(self._descriptor, offset, out)
            done = _read_direct(self.direct, offset, out, done)
        while done < out.size:
            count = os.preadv(self._descriptor, [out[done:].data], offset + done)
            if count == 0:
                break
            done += count
        return done


class RangeReader:
    """Open files, and the threads that read them. Safe to call from several threads. Use as a context manager."""

    def __init__(self, paths: Sequence[Path], threads: int | None = None) -> None:
        self.files: list[RangeFile] = []
        self.threads = threads or min(MAX_THREADS, max(MIN_THREADS, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="read")
        try:
            for path in paths:
                self.files.append(RangeFile(path))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self.files:
            file.close()
        self.files.clear()

    def read(self, number: int, offset: int, out: Bytes) -> None:
        """Fills `out`, contiguous, with the bytes of file `number` from `offset` on.

        Raises CheckpointError when the file ends before that, changed since it was opened, or cannot be read.
        """
        file = self.files[number]
        if out.size <= CHUNK_BYTES:
            _fill(file, offset, out)
        else:
            starts = range(0, out.size, CHUNK_BYTES)
            finish([self._pool.submit(_fill, file, offset + at, out[at : at + CHUNK_BYTES]) for at in starts])
        self.check(number)

    def read_here(self, number: int, offset: int, out: Bytes) -> None:
        """The same, in the calling thread."""
        self.fill(number, offset, out)
        self.check(number)

    def fill(self, number: int, offset: int, out: Bytes) -> None:
        """As `read_here`, what is cached in one system call if the system does as it is asked; without `check`."""
        _fill(self.files[number], offset, out, step=max(1, out.size))

    def check(self, number: int) -> None:
        """Raises CheckpointError when the file changed since it was opened."""
        if self.files[number].changed():
            raise CheckpointError(f"{self.files[number].path} changed while it was read", "ft verify")


def _fill(file: RangeFile, offset: int, out: Bytes, step: int = CHUNK_BYTES) -> None:
    if file.read(offset, out, step) < out.size:
        raise CheckpointError(f"{file.path} ended while it was read: it changed", "ft verify")


def finish(parts: Sequence[Future[Any]]) -> None:
    """Waits for all: none may write into a buffer that the caller already gave up. Then raises the first error, which
    is CancelledError where their threads were ended meanwhile.
    """
    try:
        for part in parts:
            part.result()
    finally:
        for part in parts:
            if not part.cancel():  # it runs, or it is over
                part.exception()


def _open_direct(path: Path, descriptor: int) -> int | None:
    """The same file once more, with O_DIRECT; None where the file system has none."""
    if not DIRECT or NOWAIT is None:
        return None
    try:
        direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | DIRECT)
    except OSError:
        return None
    if not os.path.sameopenfile(descriptor, direct):  # another file took the name meanwhile
        os.close(direct)
        return None
    return direct


def _read_cached(descriptor: int, offset: int, out: Bytes) -> int:
    """Copies what the page cache has of the range, from its beginning on; returns how much."""
    assert NOWAIT is not None
    done = 0
    # A miss makes the kernel read ahead; one page asked for first keeps that short.
    wanted = min(out.size, PAGE)
    try:
        while done < out.size:
            count = os.preadv(descriptor, [out[done : done + wanted].data], offset + done, NOWAIT)
            if count == 0:
                break
            done += count
            wanted = out.size
    except OSError as error:  # EAGAIN: not in the cache; the rest: a file system without RWF_NOWAIT
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return done


def _read_direct(direct: int, offset: int, out: Bytes, done: int) -> int:
    """How much of `out` is filled after direct reads from its byte `done` on; less than all where they end."""
    while done < out.size:
        at, left = offset + done, out.size - done
        skip = at % PAGE
        straight = skip == 0 and left >= PAGE and out[done:].ctypes.data % PAGE == 0
        most = min(left, CHUNK_BYTES)  # whoever else waits for the disk, an import say, waits behind all that is asked
        target = out[done : done + most // PAGE * PAGE] if straight else _bounce()[: -(-(skip + most) // PAGE) * PAGE]
        try:
            count = min(os.preadv(direct, [target.data], at - skip) - skip, left)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break  # another alignment is wanted: leave the rest to ordinary reads
        if count <= 0:
            break
        if not straight:
            out[done : done + count] = target[skip : skip + count]
        done += count
    return done


def _bounce() -> Bytes:
    """This thread's aligned buffer, for destinations and ends that are not aligned themselves."""
    buffer: Bytes | None = getattr(_local, "bounce", None)
    if buffer is None:
        buffer = _local.bounce = aligned_bytes(CHUNK_BYTES + 2 * PAGE)
    return buffer
