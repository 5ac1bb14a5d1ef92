"""A directory held by its file descriptor: what is done in it cannot be led elsewhere by a link planted meanwhile.

Every name is one plain part, looked up relative to the descriptor (openat and its kin) and never followed when it is a
link. The directory that `Folder.at` opens is the user's own choice and may be reached through links.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import TracebackType

from ftengine.weights.exchange import exchange


class Folder:
    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path  # for messages; nothing is opened by it

    @classmethod
    def at(cls, path: Path) -> Folder:
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def child(self, name: str) -> Folder:
        """The directory `name`, made if need be. A link or a file in its place is removed."""
        for _ in range(8):  # someone may plant a new one each time
            try:
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
                return Folder(fd, self.path / name)
            except FileNotFoundError:
                self._make(name)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                self.remove(name)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(self.path / name))

    def _make(self, name: str) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=self.fd)
        except FileExistsError:
            pass

    def open(self, name: str, flags: int) -> int:
        """A descriptor of the regular file `name`. OSError ELOOP for a link; EINVAL for a pipe, a device, or a file
        that has another name somewhere: writing into it would change that one too.
        """
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        found = os.fstat(fd)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if not stat.S_ISREG(found.st_mode) or (writes and found.st_nlink != 1):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a file of its own", str(self.path / name))
        return fd

    def size(self, name: str) -> int | None:
        """Of the regular file `name`; None when there is none, or something else bears the name."""
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def names(self) -> list[str]:
        return sorted(os.listdir(self.fd))  # noqa: PTH208 - Path knows no descriptors

    def exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def rename(self, name: str, to: Folder, new: str) -> None:
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=to.fd)

    def exchange(self, name: str, other: str) -> bool:
        """Both change places at once; False where that cannot be done."""
        return exchange(name, other, self.fd)

    def link(self, name: str, to: Folder, new: str) -> None:
        """A second name for a file; moved instead where the file system knows no such thing."""
        try:
            os.link(name, new, src_dir_fd=self.fd, dst_dir_fd=to.fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise
            self.rename(name, to, new)

    def remove(self, name: str) -> None:
        """A file, a link (never what it points to) or a whole directory, if it is there."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # unlink of a directory: EISDIR on Linux, EPERM on macOS
            self._remove_directory(name)

    def _remove_directory(self, name: str) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        with Folder(fd, self.path / name) as inner:
            for entry in inner.names():
                inner.remove(entry)
        os.rmdir(name, dir_fd=self.fd)

    def sync(self) -> None:
        os.fsync(self.fd)

    def as_path(self) -> Path:
        """A path to this very directory for code that takes paths. Where the system gives none, the ordinary one."""
        through = Path(f"/proc/self/fd/{self.fd}")
        return through if through.is_dir() else self.path
