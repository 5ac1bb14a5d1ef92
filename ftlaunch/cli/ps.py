"""`ft ps`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ftlaunch.cli.output import Output, duration, json_option

if TYPE_CHECKING:
    from ftlaunch.servers import ServerRecord

COLUMNS = ("MODEL", "URL", "STATE", "PID", "UP", "DEVICE", "CONTEXT", "LAUNCHES", "LOG")


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show the running servers.

    One row a server: its model, where it listens, whether it is still loading, its process id, how long it runs,
    what it computes on, the tokens of context that one conversation can have, how many launches use it, and the file
    that holds its log.
    """
    from ftlaunch.servers import health, lost, running

    facts = [_facts(record, health(record)) for record in running() + lost()]
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
        "device": None if answer is None else answer.get("device"),
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
        duration(fact["up_seconds"]),
        fact["device"] or "-",
        "-" if fact["context"] is None else str(fact["context"]),
        "-" if fact["launches"] is None else str(fact["launches"]),
        fact["log"] or "(its terminal)",
    ]
