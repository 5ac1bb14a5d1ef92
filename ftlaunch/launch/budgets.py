"""Whether the server that a launch uses keeps prompts as the launch asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftengine.errors import FtError
from ftlaunch.launch.request import LaunchRequest, Talk

if TYPE_CHECKING:
    from ftlaunch.servers import ServerRecord

BUDGETS = ("cache_device", "cache_host", "cache_disk")


def check(request: LaunchRequest, record: ServerRecord, talk: Talk) -> None:
    """Says what is otherwise than asked for, as with a server that ran already. Raises FtError where prompts must not
    be written to the disk and the server does that."""
    asked = _asked(request)
    if not asked:
        return
    from ftengine.memory.sizes import gigabytes
    from ftlaunch.servers.ask import ask

    again = f"ft stop {record.port}, then launch again"
    known = (ask(record, "/v1/stats", 5.0) or {}).get("facts")
    for flag, name, size in asked:
        fact = known.get(name) if isinstance(known, dict) else None
        value = fact.get("value") if isinstance(fact, dict) else None
        if value == size:
            continue
        if name == "cache_disk" and not size:
            raise FtError(
                f"the server of {record.served_name} may keep prompts on the disk, {flag} 0 forbids it", again
            )
        found = f"{gigabytes(value)} ({fact['reason']})" if isinstance(value, int) and fact else "another size"
        talk.say(f"The server of {record.served_name} has {flag} {found}, not {gigabytes(size)}. To change it: {again}")


def unused(request: LaunchRequest, url: str, talk: Talk) -> None:
    """Of a server that others run."""
    if asked := _asked(request):
        flags = " and ".join(flag for flag, *_ in asked)
        talk.say(f"The server at {url} keeps prompts as it was told at its start; {flags} cannot change that")


def _asked(request: LaunchRequest) -> list[tuple[str, str, Any]]:
    """Flag, name and bytes of each budget that was given."""
    given = [(name, getattr(request, name)) for name in BUDGETS]
    return [(f"--{name.replace('_', '-')}", name, size) for name, size in given if size is not None]
