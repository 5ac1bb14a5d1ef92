"""The one way out for every command.

Results go to stdout, what is going on to stderr, so that a pipe gets results only. On a terminal tables and bars are
drawn (rich); into a pipe or file go plain lines with tab-separated columns; with --json one JSON document.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


class Output:
    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def say(self, text: str) -> None:
        """What is being done (stderr)."""
        click.echo(text, err=True)

    def result(self, text: str, data: Any) -> None:
        """A command's result: `text` for people, `data` for --json."""
        if self.as_json:
            self._json(data)
        elif text:
            click.echo(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], data: Any, empty: str) -> None:
        """Rows under headings. `data` replaces them with --json; `empty` is said (stderr) when there are no rows."""
        if self.as_json:
            self._json(data)
        elif not rows:
            if empty:
                self.say(empty)
        elif sys.stdout.isatty():
            _draw(columns, rows)
        else:
            for row in (columns, *rows):
                click.echo("\t".join(row))

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, float], None]]:
        """Gives `show(stage, fraction 0..1)`: a bar per stage on a terminal, else a line now and then (stderr)."""
        from ftlaunch.cli.progress import Bars, Lines

        with Bars() if sys.stderr.isatty() else Lines(self.say) as show:
            yield show

    def _json(self, data: Any) -> None:
        import json

        click.echo(json.dumps(data, indent=2, default=str))


def duration(seconds: int) -> str:
    if seconds < 60:
        return f"{seconds}s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes}m{seconds % 60:02d}s" if minutes < 60 else f"{hours}h{minutes % 60:02d}m"


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
