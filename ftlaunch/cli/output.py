"""The one way out for every command.

Results go to stdout, what is going on to stderr, so that a pipe gets results only. On a terminal tables and bars are
drawn (rich) and lines folded at 80 columns. Into a pipe or file go plain lines, one a row, value or sentence however
long, with tab-separated columns and no control characters; with --json one JSON document.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

COLUMNS, LABEL, HANG = 80, 10, 3  # of a screen, of a value's name, of what is left of a folded sentence
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # none is meant to be in a cell; a folder's name may have any

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
                click.echo(_plain(row))

    def lines(self, texts: Iterable[str]) -> None:
        """Sentences, for people: with --json nothing is said."""
        for text in () if self.as_json else texts:
            click.echo(fold(text) if sys.stdout.isatty() else _plain([text]))

    def values(self, named: Iterable[tuple[str, str]]) -> None:
        """The same of names and values. Several of one name follow each other; a screen has it once."""
        before = ""
        for name, text in () if self.as_json else named:
            click.echo(value("" if name == before else name, text) if sys.stdout.isatty() else _plain([name, text]))
            before = name

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


def fold(text: str) -> str:
    """For a screen."""
    return _filled(text, "", " " * HANG)


def value(name: str, text: str) -> str:
    """For a screen: the value in a column of its own."""
    return _filled(text, f"{name:<{LABEL}}", " " * LABEL)


def _filled(text: str, first: str, others: str) -> str:
    """Options and paths, which are copied from a screen, stay whole."""
    return textwrap.fill(
        text, COLUMNS, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )


def _plain(cells: Sequence[str]) -> str:
    return "\t".join(CONTROL.sub(" ", cell) for cell in cells)


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
