"""A server's own record: written locked, and again when somebody has damaged or removed it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ftengine.locks import try_lock
from ftlaunch import paths
from ftlaunch.servers.record import ServerRecord, encode
from ftlaunch.servers.registry import port_path, record_path


@contextlib.contextmanager
def publish(record: ServerRecord, *, needed: bool = True) -> Iterator[Callable[[], None]]:
    """Keep `record` while the block runs; call it in the server process. It counts once the port is announced.

    Gives what looks after it: to be called now and then, it writes the record again where that is not whole, and raises
    OSError where that cannot be done. needed: raise it at the beginning, too.
    """
    kept = _Kept(record)
    try:
        with contextlib.nullcontext() if needed else contextlib.suppress(OSError):
            kept.look()
        yield kept.look
    finally:
        for path in (record_path(record.id), port_path(record.id)):
            with contextlib.suppress(OSError):
                path.unlink()
        kept.close()


class _Kept:
    def __init__(self, record: ServerRecord) -> None:
        self._path = record_path(record.id)
        self._data = encode(record)
        self._fd: int | None = None  # holds the lock

    def look(self) -> None:
        """Raises OSError."""
        if not self._whole():
            self._write()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _whole(self) -> bool:
        if self._fd is None:
            return False
        try:
            found, own = os.lstat(self._path), os.fstat(self._fd)
            same = (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
            return same and os.pread(self._fd, len(self._data) + 1, 0) == self._data
        except OSError:
            return False

    def _write(self) -> None:
        """The file appears complete and locked: it gets its name only after both."""
        draft = paths.private(self._path.parent) / f".{self._path.stem}.{os.getpid()}"
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not try_lock(fd):
                raise RuntimeError(f"{draft} is locked by another process")
            _write_all(fd, self._data, self._path)
            _make_way(self._path)
            draft.rename(self._path)
        except BaseException:
            os.close(fd)
            draft.unlink(missing_ok=True)
            raise
        self.close()
        self._fd = fd


def _write_all(fd: int, data: bytes, path: Path) -> None:
    """path: what an error names."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _make_way(path: Path) -> None:
    """A folder of that name, which no file can replace, is set aside with what is in it."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}"))
