"""`ft-model.json`: what a model in the store is made of, and how it was made."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "ft-model.json"


def write(directory: Path, recipe: str) -> None:
    """Describe the files of `directory`. `recipe` names the way they were made."""
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.name != NAME}
    text = json.dumps({"format": 1, "recipe": recipe, "files": files}, indent=2)
    (directory / NAME).write_text(text + "\n", encoding="utf-8")


def is_complete(directory: Path, recipe: str) -> bool:
    """Whether the model was made by `recipe` and every file is there in its full size. Reads no weights."""
    written = _read(directory)
    return written is not None and written[0] == recipe and all(_size(directory / n) == s for n, s in written[1])


def damaged(directory: Path) -> str | None:
    """The first recorded file that is missing or cut short; None when all are there or no record tells."""
    written = _read(directory)
    return written and next((name for name, size in written[1] if _size(directory / name) < size), None)


def _read(directory: Path) -> tuple[str, list[tuple[str, int]]] | None:
    """The recipe, and every file with its size, by name; None for a record that is missing or makes no sense."""
    try:
        content = json.loads((directory / NAME).read_text(encoding="utf-8"))
        return str(content["recipe"]), sorted((str(name), int(size)) for name, size in content["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
