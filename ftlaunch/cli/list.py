"""`ft list`."""

from __future__ import annotations

import click

from ftlaunch.cli.output import Output, json_option

COLUMNS = ("NAME", "SIZE", "ARCHITECTURE", "CONTEXT", "PATH")


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show the models in the store.

    One row a model: its size on disk, its architecture, the tokens of context it was made for, and its directory.
    A model that is still being fetched is not shown.
    """
    from ftlaunch.store.listing import installed

    models = installed()
    rows = [
        [m.name, _size(m.bytes), m.architecture, "-" if m.context is None else str(m.context), str(m.path)]
        for m in models
    ]
    data = [
        {"name": m.name, "bytes": m.bytes, "architecture": m.architecture, "context": m.context, "path": str(m.path)}
        for m in models
    ]
    Output(as_json).table(COLUMNS, rows, data, "The store is empty. Fetch a first model: ft pull demo")


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
