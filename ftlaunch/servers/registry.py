"""The records under run/servers/: `<id>.json` says what a server is, `<id>.port` that and where it listens.

A server holds an exclusive flock on its own record for as long as it lives. The kernel drops the lock however the
process ends, so a record without a lock is a leftover, and neither a reused process id nor a stepped clock (virtual
machines that slept) can make another process look like a server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ftlaunch import paths
from ftlaunch.locks import is_locked, try_lock
from ftlaunch.servers.record import ServerRecord, decode, encode

MAX_BYTES = 1 << 16


def record_path(server_id: str) -> Path:
    return paths.servers() / f"{server_id}.json"


def port_path(server_id: str) -> Path:
    """Where the server announces its port once it listens, as `{"port": …}`."""
    return paths.servers() / f"{server_id}.port"


@contextlib.contextmanager
def publish(record: ServerRecord) -> Iterator[None]:
    """Keep `record` while the block runs; call it in the server process. It counts once the port is announced.

    The file appears complete and locked: it gets its name only after both.
    """
    directory = paths.private(paths.servers())
    final, draft = record_path(record.id), directory / f".{record.id}.{os.getpid()}"
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not try_lock(fd):
            raise RuntimeError(f"{draft} is locked by another process")
        os.write(fd, encode(record))
        draft.rename(final)
        yield
    finally:
        for path in (draft, final, port_path(record.id)):
            path.unlink(missing_ok=True)
        os.close(fd)


def running() -> list[ServerRecord]:
    """All servers that listen, oldest first. What dead ones left is removed on the way."""
    records = [record for path in paths.servers().glob("*.json") if (record := _live(path))]
    return sorted(records, key=lambda record: (record.started, record.id))


def find(model: str | None) -> ServerRecord | None:
    """The server of `model` (store name, served name or directory); with None, the newest server of any model."""
    from ftlaunch.store import canonical

    wanted = None if model is None else {model, canonical(model)}
    for record in reversed(running()):
        if wanted is None or record.model in wanted or record.served_name in wanted:
            return record
    return None


def is_alive(record: ServerRecord) -> bool:
    """Whether the process behind `record` still lives."""
    try:
        fd = os.open(record_path(record.id), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


def _live(path: Path) -> ServerRecord | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it ended meanwhile, or is no plain file
        return None
    try:
        if not is_locked(fd):
            path.unlink(missing_ok=True)
            port_path(path.stem).unlink(missing_ok=True)
            return None
        port = int(json.loads(port_path(path.stem).read_bytes()[:MAX_BYTES])["port"])
        return dataclasses.replace(decode(os.pread(fd, MAX_BYTES, 0)), port=port)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # not announced yet, or not ours
        return None
    finally:
        os.close(fd)
