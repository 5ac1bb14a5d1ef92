"""From an exception to what a person reads: one sentence, the next command, an exit status."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

import click

from ftengine.errors import FtError


class Told(NamedTuple):
    sentence: str
    next_step: str = ""


def _ft(error: Exception) -> Told:
    return Told(str(error), getattr(error, "next_step", ""))


def _missing_module(error: Exception) -> Told:
    name = getattr(error, "name", None) or str(error)
    return Told(f"the Python package {name} is missing or broken", "pip install --force-reinstall ftlaunch")


def _os_error(error: Exception) -> Told:
    assert isinstance(error, OSError)
    name = error.filename if error.filename is not None else "what is being written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Told(f"no space is left for {name}", "free some, or set FT_HOME to a folder on another disk")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Told(f"{name} cannot be read or written by this user", "set FT_HOME to a folder of yours")
    reason = error.strerror or str(error) or type(error).__name__
    step = "set FT_HOME to a folder of yours" if _in_home(error.filename) else ""
    return Told(f"{name}: {reason}" if error.filename is not None else reason, step)


def _in_home(filename: object) -> bool:
    from ftlaunch import paths

    home = str(paths.home())
    return isinstance(filename, str) and (filename == home or filename.startswith(f"{home}/"))


def _out_of_memory(_: Exception) -> Told:
    return Told("this machine has not enough free memory for that", "close other programs, or choose a smaller model")


def _unexpected(error: Exception) -> Told:
    return Told(f"unexpected {type(error).__name__}: {error}", "run it again with FT_DEBUG=1 to see where")


# The first row whose type fits.
TABLE: tuple[tuple[type[Exception], Callable[[Exception], Told]], ...] = (
    (FtError, _ft),
    (ImportError, _missing_module),
    (MemoryError, _out_of_memory),
    (OSError, _os_error),
    (Exception, _unexpected),
)


def report(error: Exception) -> int:
    """Tell a person (stderr) and return the exit status."""
    if isinstance(error, click.Abort):
        return 130
    if isinstance(error, BrokenPipeError):
        return _reader_gone()
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if os.environ.get("FT_DEBUG") == "1":
        traceback.print_exception(type(error), error, error.__traceback__)
    told = next(tell(error) for kind, tell in TABLE if isinstance(error, kind))
    click.echo(f"Error: {told.sentence}", err=True)
    if told.next_step:
        click.echo(f"Try:   {told.next_step}", err=True)
    return 1


def _reader_gone() -> int:
    """`ft list | head -1`: what is still buffered must not raise again when the interpreter flushes at exit.

    The status is click's own in that case.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
