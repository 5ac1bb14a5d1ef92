"""A folder's lock between processes, with a number that grows with every turn. The kernel drops it with its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

from ftengine.cache.tiers.files import Folder

NAME = "lock"
NUMBER_BYTES = 8
WAIT_SECONDS = 0.005
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class FolderLock:
    def __init__(self, folder: Folder) -> None:
        """Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(NAME, flags, 0o600, dir_fd=folder.fd)
        try:
            os.fchmod(self._fd, 0o600)
        except BaseException:
            os.close(self._fd)
            raise
        self._seen = -1

    @contextlib.contextmanager
    def held(self, patience: float) -> Iterator[bool]:
        """Yields whether another process had a turn since this one's last. Raises OSError EAGAIN after `patience`
        seconds. On a file system without locks there is none to wait for."""
        self._acquire(patience)
        try:
            number = int.from_bytes(os.pread(self._fd, NUMBER_BYTES, 0), "little")
            changed = number != self._seen
            self._seen = (number + 1) % (1 << 62)
            os.pwrite(self._fd, self._seen.to_bytes(NUMBER_BYTES, "little"), 0)
            yield changed
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)

    def _acquire(self, patience: float) -> None:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in UNSUPPORTED:
                    return
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > end:
                    raise
            time.sleep(WAIT_SECONDS)
