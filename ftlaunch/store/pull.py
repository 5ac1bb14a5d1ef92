"""Fetching a model of the catalogue into the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import FtError
from ftlaunch.store import manifest
from ftlaunch.store.catalogue import CATALOGUE
from ftlaunch.store.install import site
from ftlaunch.store.names import looks_like_path, unknown
from ftlaunch.store.progress import Message, Progress


@dataclass(frozen=True)
class Pulled:
    name: str
    path: Path
    fetched: bool  # False: it was there, complete


def pull(
    name: str,
    on_progress: Progress = lambda stage, done: None,
    on_message: Message = lambda text: None,
) -> Pulled:
    """Make sure that the store holds `name`, complete. Raises FtError with what to do when that cannot be."""
    entry = CATALOGUE.get(name)
    if entry is None:
        if looks_like_path(name):
            raise FtError(f"{name} is a directory, there is nothing to fetch", f"ft serve --model {name}")
        raise unknown(name)
    recipe = entry.recipe()
    with site(name, on_wait=lambda: on_message(f"Waiting for another ft that fetches {name}")) as here:
        if manifest.is_complete(here.final, recipe.version()):
            return Pulled(name, here.final, fetched=False)
        here.partial.mkdir()
        here.downloads.mkdir(exist_ok=True)
        recipe.build(here.partial, here.downloads, on_progress, on_message)
        here.finish(recipe.version())
        return Pulled(name, here.final, fetched=True)
