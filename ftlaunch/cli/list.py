"""`ft list`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ftlaunch.cli.output import Output, json_option

if TYPE_CHECKING:
    from ftlaunch.store.listing import Installed, Partial

COLUMNS = ("NAME", "SIZE", "FORMAT", "WEIGHTS", "CONTEXT", "USED", "ARCHITECTURE", "PATH")


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show the models on this machine.

    One row a model: its size on disk, the format of its files and of the numbers in them, the tokens of context it was
    made for, when it was last served, its architecture, and its directory. Models that lie complete in the Hugging
    Face cache are shown as well and can be served where they are. Downloads that were interrupted are named below.
    """
    from shlex import quote

    from ftlaunch.store.listing import cached, installed, partial

    models, incomplete = [*installed(), *cached()], partial()
    data = [*map(_facts, models), *map(_partial_facts, incomplete)]
    output = Output(as_json)
    empty = "The store is empty. Fetch a first model: ft pull demo"
    output.table(COLUMNS, [_row(model) for model in models], data, "" if incomplete else empty)
    if not as_json:
        for item in incomplete:
            step = f"Complete it: ft pull {item.name}" if item.can_go_on else f"Remove it: ft rm {quote(item.name)}"
            output.say(f"{item.name}: {size(item.bytes)} fetched, not complete. {step}")


def _facts(model: Installed) -> dict[str, Any]:
    return {
        "name": model.name,
        "bytes": model.bytes,
        "format": model.format or None,
        "weights": model.weights or None,
        "architecture": model.architecture,
        "context": model.context,
        "last_used": None if model.last_used is None else round(model.last_used),
        "where": model.where,
        "complete": True,
        "path": str(model.path),
    }


def _partial_facts(item: Partial) -> dict[str, Any]:
    return {"name": item.name, "bytes": item.bytes, "where": "store", "complete": False, "path": str(item.path)}


def _row(model: Installed) -> list[str]:
    return [
        model.name if model.where == "store" else f"{model.name} (Hugging Face cache)",
        size(model.bytes),
        model.format or "-",
        model.weights or "-",
        "-" if model.context is None else str(model.context),
        ago(model.last_used),
        model.architecture,
        str(model.path),
    ]


def size(count: int) -> str:
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= length:
            return f"{count / length:.1f} {unit}" if count < 10 * length else f"{count / length:.0f} {unit}"
    return f"{count} B"


def ago(moment: float | None) -> str:
    if moment is None:
        return "never"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit} ago"
    return "now"
