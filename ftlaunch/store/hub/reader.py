"""Small pieces of a repository, into memory: what must be known before a download is decided."""

from __future__ import annotations

from ftlaunch.store.hub.connection import Connections
from ftlaunch.store.hub.digest import Digest
from ftlaunch.store.hub.errors import HubError, Passing
from ftlaunch.store.hub.limits import CHUNK
from ftlaunch.store.hub.patience import Patience, Say
from ftlaunch.store.hub.ranges import Ranges, Source
from ftlaunch.store.hub.repository import RemoteFile


class Reader:
    """Used by one thread."""

    def __init__(self, source: Source, say: Say) -> None:
        self._source = source
        self._say = say
        self._connections = Connections(source.limits.timeout)
        self._whole: dict[str, bytes] = {}

    def whole(self, file: RemoteFile) -> bytes:
        """A file's content, which fits its hash. Raises HubError when it does not, twice."""
        if file.key not in self._whole:
            content = self._checked(file) or self._checked(file)
            if content is None:
                raise HubError(f"{file.path} arrives damaged from the Hub, twice", "try later")
            self._whole[file.key] = content
        return self._whole[file.key]

    def _checked(self, file: RemoteFile) -> bytes | None:
        content = self.range(file, 0, file.size) if file.size else b""
        digest = Digest(file)
        digest.update(content)
        return content if digest.fits() else None

    def range(self, file: RemoteFile, start: int, end: int) -> bytes:
        patience = Patience(self._source.limits, file.path, self._say)
        received = bytearray()
        while len(received) < end - start:
            try:
                with Ranges(self._source, self._connections).open(file, start + len(received), end) as body:
                    while body.left:
                        received += body.read(CHUNK)
            except Passing as trouble:
                # A 200 answers only to the whole file, so a small one begins anew: servers need not know ranges for it.
                if (start, end) == (0, file.size):
                    received.clear()
                patience.after(trouble)
        return bytes(received)

    def close(self) -> None:
        self._connections.close()
