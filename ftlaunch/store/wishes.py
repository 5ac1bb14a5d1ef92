"""What a pull is asked for, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import FtError


@dataclass(frozen=True)
class Wishes:
    """files: patterns that weights must match instead of the usual choice. to: a directory instead of the store.

    confirm: asks a person; False is a no, also when there is nobody to ask. look: is shown the model before it is
    fetched, as headers with holes behind and the bytes that are to come, or as a name and 0 if it is made here; gives
    sentences for a person.
    """

    files: tuple[str, ...] = ()
    to: Path | None = None
    confirm: Callable[[str], bool] = lambda question: False
    look: Callable[[Path, int], list[str]] = lambda path, size: []


@dataclass(frozen=True)
class Pulled:
    name: str
    path: Path
    fetched: bool  # False: it was there, complete


def ask(wishes: Wishes, concerns: list[str], command: str) -> None:
    """Raises FtError unless there is nothing to be concerned about or a person wants it nevertheless."""
    if concerns:
        text = "; ".join(concerns)
        if not wishes.confirm(f"{text[:1].upper()}{text[1:]}. Fetch it anyway?"):
            raise FtError(text, f"{command} --yes, or choose another model")


def check_disk(path: Path, free: int, needed: int) -> None:
    """bytes. Raises FtError with the numbers."""
    if needed + (32 << 20) > free:
        raise FtError(
            f"{needed / 1e9:.2f} GB are still to come to {path}, where {free / 1e9:.2f} GB are free",
            "free some, set FT_HOME to a folder on another disk, or give --to DIR",
        )
