"""A folder of records, held by its descriptor and read as what strangers may have changed. Torch-free.

Every name is looked up relative to the descriptor and never followed where it is a link, so nothing planted in the
folder leads out of it. Folders are 0700, files 0600, whatever the umask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ftengine.private import private_folder

TEMPORARY = ".writing-"
NO_FILE = (errno.ELOOP, errno.EINVAL)  # Folder.open: what bears the name is no regular file


@dataclass(frozen=True)
class Entry:
    """A regular file. modified: seconds since the epoch."""

    name: str
    size: int
    modified: float


class Folder:
    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path  # for messages, and to see whether it is still there; nothing is opened by it

    @classmethod
    def at(cls, path: Path) -> Folder:
        """Made if need be. The path itself is the user's own choice and may be reached through links.

        Raises OSError; PermissionError for a folder that belongs to another user.
        """
        private_folder(path)
        return cls._private(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)

    def child(self, name: str, *, make: bool = False) -> Folder:
        """Raises OSError: ENOTDIR or ELOOP where something else, or a link, bears the name."""
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        return self._private(fd, self.path / name)

    @classmethod
    def _private(cls, fd: int, path: Path) -> Folder:
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
            if stat.S_IMODE(found.st_mode) != 0o700:
                os.fchmod(fd, 0o700)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path)

    def close(self) -> None:
        os.close(self.fd)

    def is_gone(self) -> bool:
        """Whether it was removed: its path leads nowhere, or to another folder."""
        try:
            there, own = self.path.stat(), os.fstat(self.fd)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)

    def modified(self) -> int:
        """Nanoseconds; changes with every name that comes or goes."""
        return os.fstat(self.fd).st_mtime_ns

    def entries(self) -> list[Entry]:
        return [Entry(entry.name, found.st_size, found.st_mtime) for entry, found in self._scan(stat.S_ISREG)]

    def folders(self) -> list[str]:
        return sorted(entry.name for entry, _ in self._scan(stat.S_ISDIR))

    def _scan(self, wanted: object) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        with os.scandir(self.fd) as listed:
            for entry in listed:
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    found = entry.stat(follow_symlinks=False)
                    if callable(wanted) and wanted(found.st_mode):
                        yield entry, found

    def open(self, name: str) -> int:
        """For reading. OSError ELOOP for a link, EINVAL for what is no regular file."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(self.path / name))
        return fd

    def read(self, name: str, limit: int) -> bytes:
        fd = self.open(name)
        try:
            return os.read(fd, limit)
        finally:
            os.close(fd)

    def write(self, name: str, parts: list[memoryview]) -> None:
        """The file appears under its name whole or not at all, and is on the disk then. Raises OSError.

        The folder's entry is not forced to the disk: a record that a power cut takes is only computed again.
        """
        draft = f"{TEMPORARY}{os.getpid()}-{name}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.remove(draft)
        fd = os.open(draft, flags, 0o600, dir_fd=self.fd)
        try:
            try:
                os.fchmod(fd, 0o600)
                for part in parts:
                    _write_all(fd, part)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(draft, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove(draft)
            raise

    def touch(self, name: str, modified: float) -> None:
        with contextlib.suppress(OSError):
            os.utime(name, (modified, modified), dir_fd=self.fd, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """A file or a link, never what it points to; if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def remove_folder(self, name: str) -> None:
        """If it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.fd)

    def free(self) -> int:
        """Bytes that a file may still take, less what is left to others on a file system that is nearly full."""
        found = os.fstatvfs(self.fd)
        return (found.f_bavail - min(found.f_blocks // 50, RESERVE // max(found.f_frsize, 1))) * found.f_frsize


RESERVE = 1 << 30  # bytes, or a fiftieth of a small file system


def _write_all(fd: int, part: memoryview) -> None:
    while part.nbytes:
        written = os.write(fd, part[:WRITE_BYTES])
        part = part[written:]


WRITE_BYTES = 8 << 20  # at a time, so that the disk begins while the next part is handed over
