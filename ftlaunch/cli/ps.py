"""`ft ps`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ftlaunch.cli.output import Output, json_option

if TYPE_CHECKING:
    from ftlaunch.servers import ServerRecord

COLUMNS = ("MODEL", "URL", "STATE", "PID", "UP", "CONTEXT", "LAUNCHES", "LOG")


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show the running servers.

    One row a server: its model, where it listens, whether it is still loading, its process id, how long it runs, the
    tokens of context that one conversation can have, how many launches use it, and the file that holds its log.
    """
    from ftlaunch.servers import health, running

    facts = [_facts(record, health(record)) for record in running()]
    Output(as_json).table(
        COLUMNS, [_row(fact) for fact in facts], facts, "No server runs. Start one: ft serve --model demo"
    )


def _facts(record: ServerRecord, answer: dict[str, Any] | None) -> dict[str, Any]:
    from ftlaunch.servers.health import state

    return {
        "id": record.id,
        "model": record.served_name,
        "source": record.model,
        "url": record.url,
        "state": state(answer),
        "pid": record.pid,
        "up_seconds": round(max(0.0, time.time() - record.started)),
        "context": None if answer is None else answer.get("context_length"),
        "launches": _leases(record),
        "log": None if record.log is None else str(record.log),
    }


def _leases(record: ServerRecord) -> int | None:
    if record.lease_dir is None:
        return None
    from ftengine.leases import held

    return held(record.lease_dir)


def _row(fact: dict[str, Any]) -> list[str]:
    return [
        fact["model"],
        fact["url"],
        fact["state"],
        str(fact["pid"]),
        _duration(fact["up_seconds"]),
        "-" if fact["context"] is None else str(fact["context"]),
        "-" if fact["launches"] is None else str(fact["launches"]),
        fact["log"] or "(its terminal)",
    ]


def _duration(seconds: int) -> str:
    if seconds < 60:
        return f"{seconds}s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes}m{seconds % 60:02d}s" if minutes < 60 else f"{hours}h{minutes % 60:02d}m"
