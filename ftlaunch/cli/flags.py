"""Flags of `ft serve` that are given to another command, in quotes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ftlaunch.servers.options import ServeOptions

CHOSEN = ("--model", "--host", "--port", "--api-key", "--served-model-name", "--background", "--leased")


def words(flags: str, why: str) -> list[str]:
    """Raises UsageError for quotes that are not closed, and for flags in CHOSEN. why: they may not be given."""
    try:
        found = shlex.split(flags)
    except ValueError as error:
        raise click.UsageError(f"--flags {flags!r}: {error}") from error
    chosen = [name for word in found if (name := word.partition("=")[0]) in CHOSEN]
    if chosen:
        raise click.UsageError(f"--flags: {chosen[0]} {why}")
    return found


def serve_options(arguments: Sequence[str]) -> ServeOptions:
    """As `ft serve` would take them. Raises UsageError for what it would not."""
    from ftlaunch.cli.serve import command
    from ftlaunch.servers.options import ServeOptions

    help_names = click.get_current_context().help_option_names  # click keeps a command's first ones
    context = command.make_context("ft serve", [*arguments], help_option_names=help_names)
    options = {**context.params, "api_key": None}
    if (word := options.pop("which")) is not None:
        raise click.UsageError(f"--flags: {word!r} is no flag of ft serve")
    return ServeOptions(**options)
