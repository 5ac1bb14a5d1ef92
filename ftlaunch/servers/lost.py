"""Servers that live though their records cannot be read: told from what they announced and from who listens.

A server writes its record again within a second or so. Where it cannot (a full disk, a folder of another user), it can
still be seen and stopped.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ftlaunch import paths
from ftlaunch.servers.ask import ask
from ftlaunch.servers.ports import is_ft, listener, serves
from ftlaunch.servers.record import ServerRecord
from ftlaunch.servers.registry import announced, known_ids, log_path, running

HEALTH_SECONDS = 2.0
OURS = "ft's server of"
UNKNOWN = "a model that it does not tell"


def lost() -> list[ServerRecord]:
    """Of this FT_HOME. What their records said of keys and leases is not known."""
    sound = {record.id for record in running()}
    found = []
    for server_id in sorted(known_ids() - sound):
        where = announced(server_id)
        if where is not None and serves(where.pid, where.port):
            record = _record(server_id, where.pid, where.host, where.port)
            found.append(_named(record, ask(record, "/health", HEALTH_SECONDS)))
    return found


def at_port(port: int) -> ServerRecord | None:
    """The server of ft, of this FT_HOME or another one, that listens there; None for anything else."""
    found = listener(port)
    if found is None or not is_ft(found[0]):  # other programs are not asked anything
        return None
    pid, host = found
    record = _record("", pid, host, port)
    health = ask(record, "/health", HEALTH_SECONDS)
    if health is None or health.get("pid") != pid or "engine_pid" not in health:
        return None
    return _named(record, health)


def holder(port: int) -> str:
    """Who listens on `port`, as well as this user may know."""
    known = next((record for record in running() if record.port == port), None) or at_port(port)
    if known is not None:
        return f"{OURS} {known.served_name} (pid {known.pid})"
    from ftengine.api.listen import port_holder

    return port_holder(port)


def _record(server_id: str, pid: int, host: str, port: int) -> ServerRecord:
    log = log_path(server_id) if server_id else None
    return ServerRecord(
        id=server_id,
        pid=pid,
        host=host,
        port=port,
        model="",
        served_name=UNKNOWN,
        log=log if log is not None and log.exists() else None,
        started=time.time(),
        api_key=None,
        lease_dir=folder if server_id and (folder := paths.leases(server_id)).is_dir() else None,
    )


def _named(record: ServerRecord, health: dict[str, Any] | None) -> ServerRecord:
    if health is None:
        return record
    name, up = health.get("model"), health.get("uptime_seconds")
    started = record.started - up if isinstance(up, (int, float)) else record.started
    return dataclasses.replace(record, served_name=str(name or UNKNOWN), started=started)
