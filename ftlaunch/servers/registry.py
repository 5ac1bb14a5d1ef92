"""The records under run/servers/: `<id>.json` says what a server is, `<id>.port` that and where it listens.

A server holds an exclusive flock on its own record for as long as it lives. The kernel drops the lock however the
process ends, so a record without a lock is a leftover, and neither a reused process id nor a stepped clock (virtual
machines that slept) can make another process look like a server. Unless the file was put in the place of the locked
one: then its process listens where it announced that, and will write it again (servers/publish.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import NamedTuple

from ftengine.locks import is_locked
from ftlaunch import paths
from ftlaunch.servers.ports import listens, serves
from ftlaunch.servers.record import ServerRecord, decode

MAX_BYTES = 1 << 16


class Announcement(NamedTuple):
    port: int
    host: str
    pid: int  # 0: not told


def record_path(server_id: str) -> Path:
    return paths.servers() / f"{server_id}.json"


def port_path(server_id: str) -> Path:
    """Where the server announces its port once it listens, as `{"pid": …, "host": …, "port": …}`."""
    return paths.servers() / f"{server_id}.port"


def log_path(server_id: str) -> Path:
    """Of a server in the background."""
    return paths.logs() / f"{server_id}.log"


def running() -> list[ServerRecord]:
    """All servers that listen, oldest first. What dead ones left is removed on the way."""
    records = [record for server_id in known_ids() if (record := _live(server_id))]
    return sorted(records, key=lambda record: (record.started, record.id))


def known_ids() -> set[str]:
    """Of everything there is a file of."""
    return {path.stem for ending in ("json", "port") for path in paths.servers().glob(f"[!.]*.{ending}")}


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
    fd = _open(record_path(record.id))
    if fd is not None:
        try:
            if is_locked(fd):
                return True
        finally:
            os.close(fd)
    return listens(record.pid, record.port)


def announced(server_id: str) -> Announcement | None:
    """None where nothing readable is announced."""
    fd = _open(port_path(server_id))
    if fd is None:
        return None
    try:
        found = json.loads(os.pread(fd, MAX_BYTES, 0))
        return Announcement(int(found["port"]), str(found.get("host") or ""), int(found.get("pid") or 0))
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    finally:
        os.close(fd)


def _live(server_id: str) -> ServerRecord | None:
    where = announced(server_id)
    fd = _open(record_path(server_id))
    try:
        if fd is None or not is_locked(fd):
            if where is None or not serves(where.pid, where.port):
                _forget(server_id)
            return None
        if where is None:  # not yet
            return None
        record = decode(os.pread(fd, MAX_BYTES, 0))
        if where.pid not in (0, record.pid):  # somebody has changed one of them: `lost` looks at what was announced
            return None
        return dataclasses.replace(record, port=where.port)
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        if fd is not None:
            os.close(fd)


def _open(path: Path) -> int | None:
    """None where there is no such file, or none that can be opened; a pipe is not waited for."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


def _forget(server_id: str) -> None:
    for path in (record_path(server_id), port_path(server_id)):
        with contextlib.suppress(OSError):  # gone meanwhile, or no file
            path.unlink()
