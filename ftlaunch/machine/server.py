"""The port that a server takes by default, and the servers that run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftlaunch.machine.probe import Asked, Silence
from ftlaunch.machine.verdict import Finding, plural
from ftlaunch.servers import ports, running
from ftlaunch.servers.lost import OURS, holder, lost
from ftlaunch.servers.options import DEFAULT_HOST, DEFAULT_PORT


def probe(asked: Asked) -> Iterator[Finding]:
    found = running() + lost()
    yield servers([f"{record.served_name} on {record.port}" for record in found])
    yield port(DEFAULT_PORT, {record.port for record in found})


def silent(silence: Silence) -> list[Finding]:
    known = [finding for finding in by_records() if finding.id not in silence.told]
    if any(finding.id == "server.port" for finding in known):
        return known
    return [*known, silence.unknown()]


def by_records() -> list[Finding]:
    """What locks and records alone tell, where a busy machine leaves no time for more; nothing where none runs."""
    records = running()
    if not records:
        return []
    named = servers([f"{record.served_name} on {record.port}" for record in records])
    held = (record for record in records if record.port == DEFAULT_PORT)
    return [named, *(_held_by_ours(each.port, f"{OURS} {each.served_name} (pid {each.pid})") for each in held)]


def servers(names: list[str]) -> Finding:
    if not names:
        return Finding("server.running", "running", "none", data={"servers": []})
    value = f"{plural(len(names), 'server')}: {', '.join(names)}"
    cost = "memory, cores and the GPU are shared with what is measured here"
    return Finding("server.running", "running", value, "note", cost, "ft ps, ft stop --all", {"servers": names})


def port(number: int, own: set[int]) -> Finding:
    data: dict[str, Any] = {"port": number, "free": False, "holder": None}
    try:
        if ports.is_free(DEFAULT_HOST, number):
            return Finding("server.port", "port", f"{number} is free", data={**data, "free": True})
    except OSError as error:
        cost, value = "ft serve cannot listen", f"{DEFAULT_HOST}:{number}: {error.strerror}"
        return Finding("server.port", "port", value, "bad", cost, "sudo ip link set lo up", data)
    data["holder"] = by = holder(number)
    if number in own:
        return _held_by_ours(number, by)
    cost = "ft serve refuses it, ft launch takes another one"
    other = f"ft serve --port {number + 1}"
    mend = f"ft stop {number}, or {other}" if by.startswith(OURS) else other
    return Finding("server.port", "port", f"{number} is held by {by}", "note", cost, mend, data)


def _held_by_ours(number: int, by: str) -> Finding:
    data = {"port": number, "free": False, "holder": by}
    return Finding("server.port", "port", f"{number}: {by}", data=data)
