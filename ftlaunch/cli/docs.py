"""Prints docs/cli.md from the help of every command: `python -m ftlaunch.cli.docs [--check FILE]`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ftlaunch.cli.app import COMMANDS, ft

WIDTH = 100
INTRODUCTION = """# The command line

Generated from `--help` by `python -m ftlaunch.cli.docs`; a check compares them.
"""


def text() -> str:
    pages = "\n".join(f"## {title}\n\n```text\n{page.rstrip()}\n```\n" for title, page in _pages())
    return f"{INTRODUCTION}\n{pages}"


def _pages() -> Iterator[tuple[str, str]]:
    root = _context(ft, "ft", None)
    yield "ft", ft.get_help(root)
    for name in COMMANDS:
        command = ft.get_command(root, name)
        assert command is not None
        context = _context(command, name, root)
        yield from _of(command, context)


def _of(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """A command's own page, and those of the commands in it."""
    yield context.command_path, command.get_help(context)
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        part = command.get_command(context, name)
        assert part is not None
        yield from _of(part, _context(part, name, context))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    return click.Context(command, info_name=name, parent=parent, **settings)


@click.command()
@click.option(
    "--check", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Compare with FILE instead."
)
def main(check: Path | None) -> None:
    """Print docs/cli.md."""
    if check is None:
        click.echo(text(), nl=False)
        return
    there, wanted = check.read_text(encoding="utf-8").splitlines(True), text().splitlines(True)
    if there != wanted:
        sys.stdout.writelines(difflib.unified_diff(there, wanted, str(check), "from --help"))
        raise click.ClickException(f"{check} is out of date; run: python -m ftlaunch.cli.docs > {check}")


if __name__ == "__main__":
    main()
