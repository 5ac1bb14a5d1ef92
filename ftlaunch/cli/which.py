"""Which running servers a command means."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftlaunch.servers import ServerRecord


def servers_meant(which: str | None, next_step: str) -> list[ServerRecord]:
    """Those of that name, model directory or port; without it the only one, or none. A port may be that of a server
    that has no record here.

    Raises FtError when nothing fits, or without `which` several do; `next_step` is then advised.
    """
    from ftengine.errors import FtError
    from ftlaunch.servers import at_port, lost, running
    from ftlaunch.store import canonical

    if which is not None and not which.strip():
        raise FtError("no server has an empty name", "ft ps")
    records = running() + lost()
    if which is None and len(records) <= 1:
        return records
    known = ", ".join(f"{record.served_name} (port {record.port})" for record in records) or "none"
    if which is None:
        raise FtError(f"several servers run: {known}", next_step)
    names = {which, canonical(which)}
    meant = [r for r in records if str(r.port) == which or r.served_name in names or r.model in names]
    if not meant and which.isdecimal() and (other := at_port(int(which))) is not None:
        return [other]
    if not meant:
        raise FtError(f"no server of {which} runs (running: {known})", "ft ps")
    return meant


def server_meant(which: str | None, command: str) -> ServerRecord:
    """The one server of that name, model directory or port; without it the only one. Raises FtError.

    command: what is typed before NAME or PORT.
    """
    from ftengine.errors import FtError

    meant = servers_meant(which, f"{command} NAME or {command} PORT")
    if not meant:
        raise FtError("no server runs", "ft serve --model demo")
    if len(meant) > 1:
        ports = ", ".join(str(record.port) for record in meant)
        raise FtError(f"several servers of {which} run, on the ports {ports}", f"{command} PORT")
    return meant[0]
