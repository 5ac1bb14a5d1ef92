"""The models that the store holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import CheckpointError
from ftlaunch import paths


@dataclass(frozen=True)
class Installed:
    name: str
    path: Path
    bytes: int  # of all its files
    architecture: str
    context: int | None  # tokens; None when the model does not say


def installed() -> list[Installed]:
    """By name. What is being fetched is not listed; what cannot be read is, with the reason as its architecture."""
    root = paths.models()
    if not root.is_dir():
        return []
    found = sorted(path for path in root.iterdir() if not path.name.startswith(".") and path.is_dir())
    return [_describe(path) for path in found]


def _describe(path: Path) -> Installed:
    from ftengine.weights.checkpoint import Checkpoint

    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as error:
        return Installed(path.name, path, size, f"unreadable: {error}", None)
    return Installed(path.name, path, size, checkpoint.architecture, checkpoint.max_context)
