"""From what a person types to the model that is meant, damaged ones too: for commands that look and do not serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ftengine.errors import FtError
from ftlaunch.store import hf_cache
from ftlaunch.store.catalogue import short_name
from ftlaunch.store.filenames import shown
from ftlaunch.store.names import canonical, hub_name, looks_like_path, stored_folder, unknown, weights_path

Where = Literal["store", "cache", "path"]


@dataclass(frozen=True)
class Found:
    """name: as to be typed again. path: a directory, or a GGUF file."""

    name: str
    path: Path
    where: Where


def find(model: str) -> Found:
    """Raises FtError with what to do when there is no such model."""
    if looks_like_path(model):
        path = Path(canonical(model))
        if path.is_dir() or path.is_file():
            return Found(model, weights_path(path), "path")
        raise FtError(f"there is no directory or file {model}", "ft list")
    folder = stored_folder(model)
    if folder is not None:
        return Found(canonical(model), weights_path(folder), "store")
    meant = hub_name(model)
    snapshot = hf_cache.find(meant.repo, meant.revision or None) if meant is not None and not meant.gguf else None
    if snapshot is not None:
        return Found(canonical(model), snapshot, "cache")
    if meant is not None or short_name(model) is not None:
        raise FtError(f"the model {shown(model)} is not on this machine", f"ft pull {shown(model)}")
    raise unknown(model)
