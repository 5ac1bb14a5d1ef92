"""The hash that the Hub announces of a file, and the one that the store records."""

from __future__ import annotations

import hashlib

from ftlaunch.store.hub.repository import RemoteFile


class Digest:
    """SHA-256 of every file; beside it git's blob id of those that are not in LFS."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._blob = None if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        if self._blob is not None:
            self._blob.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def fits(self) -> bool:
        if self._blob is not None:
            return self._blob.hexdigest() == self._file.blob
        return self.sha256 == self._file.sha256
