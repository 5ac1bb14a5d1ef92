"""Writes the data files of an FTW directory, section by section, from several threads. Torch-free.

With O_DIRECT where the file system takes it: the kernel then keeps no second copy of what is written, and the page
cache keeps what other programs need.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ftengine.errors import FtError
from ftengine.weights.ftw.header import encode
from ftengine.weights.ftw.layout import HEADER_FILE, SECTION_ALIGN, DataFile, Header
from ftengine.weights.ranges import DIRECT, Bytes

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


class SectionWriter:
    """Makes new files in `folder`, each in its full size at once, so that a full disk shows before work is done.

    Safe to call from several threads. Use as a context manager. Raises FtError when the disk is full or fails.
    """

    def __init__(self, folder: Path, files: Sequence[DataFile]) -> None:
        self._folder = folder
        self._files: list[tuple[str, int, int | None]] = []  # name, descriptor, the same with O_DIRECT
        try:
            for file in files:
                self._create(file)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> SectionWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def write(self, number: int, offset: int, data: Bytes) -> None:
        """Puts `data` at `offset` of file `number`; both are multiples of SECTION_ALIGN in size."""
        name, descriptor, direct = self._files[number]
        try:
            if direct is not None and data.ctypes.data % SECTION_ALIGN == 0:
                done = _write_direct(direct, offset, data)
                data, offset = data[done:], offset + done
            while data.size:
                count = os.pwrite(descriptor, data.data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            raise failure(error, self._folder / name) from error

    def sync(self) -> None:
        """Returns when every byte is on the disk."""
        for name, descriptor, _ in self._files:
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise failure(error, self._folder / name) from error

    def _create(self, file: DataFile) -> None:
        path, direct = self._folder / file.name, None
        try:
            descriptor = os.open(path, NEW, 0o644)
            if DIRECT:
                try:
                    direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | DIRECT)
                except OSError:  # this file system has none
                    direct = None
            self._files.append((file.name, descriptor, direct))
            _reserve(descriptor, file.size)
        except OSError as error:
            raise failure(error, path) from error

    def _close(self) -> None:
        for _, descriptor, direct in self._files:
            os.close(descriptor)
            if direct is not None:
                os.close(direct)
        self._files.clear()


def write_file(path: Path, content: bytes) -> None:
    """A new file, on the disk when this returns."""
    try:
        with os.fdopen(os.open(path, NEW, 0o644), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise failure(error, path) from error


def write_header(folder: Path, header: Header) -> None:
    write_file(folder / HEADER_FILE, encode(header))


def failure(error: OSError, path: Path) -> FtError:
    """What a person is told of a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FtError(f"no space is left to write {path}", "free some, or give another --out")
    return FtError(f"{path} cannot be written: {error.strerror or error}", "give another --out")


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:  # a file system that cannot
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
                raise
    os.ftruncate(descriptor, size)


def _write_direct(descriptor: int, offset: int, data: Bytes) -> int:
    """How much was written; the rest is for ordinary writes, where the device wants another alignment."""
    done = 0
    while done < data.size and done % SECTION_ALIGN == 0:
        try:
            done += os.pwrite(descriptor, data[done:].data, offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break
    return done
