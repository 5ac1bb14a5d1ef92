"""The file that tells other processes where this server listens, for as long as it wants to be found."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftengine.atomic import write_atomically

log = logging.getLogger("ftengine.api")


class Announcement:
    """path: the file, None for a server that nobody looks for. look: what keeps up the rest that it is found by; it may
    raise OSError.
    """

    def __init__(self, path: str | None, listener: socket.socket, look: Callable[[], None]) -> None:
        host, port = listener.getsockname()[:2]
        self._path = None if path is None else Path(path)
        self._data = msgspec.json.encode({"pid": os.getpid(), "host": host, "port": port})
        self._look = look
        self._made = False
        self._troubled = False

    def make(self) -> None:
        self._made = True
        self.look()

    def take_back(self) -> None:
        self._made = False
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def look(self) -> None:
        """Others may have damaged or removed the file, or a full disk may have room again."""
        if not self._made or self._path is None:
            return
        try:
            self._look()
            if not self._whole(self._path):
                write_atomically(self._path, self._data, mode=0o600)  # the record beside it has that mode, too
        except OSError as error:
            if not self._troubled:
                port = msgspec.json.decode(self._data)["port"]
                log.warning("ft ps does not show this server, ft stop %d ends it: %s", port, error)
            self._troubled = True
        else:
            self._troubled = False

    def _whole(self, path: Path) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            return os.pread(fd, len(self._data) + 1, 0) == self._data
        except OSError:
            return False
        finally:
            os.close(fd)
