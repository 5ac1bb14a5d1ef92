"""Making sure that the store holds a model: from the Hub, from this machine's disk, or made here."""

from __future__ import annotations

from pathlib import Path

from ftengine.errors import FtError
from ftengine.private import owner_writes
from ftlaunch import paths
from ftlaunch.store import manifest
from ftlaunch.store.catalogue import CATALOGUE, Entry, short_name
from ftlaunch.store.events import Event, Moved, Observer, Said, Stage
from ftlaunch.store.filenames import check_path
from ftlaunch.store.install import site
from ftlaunch.store.names import canonical, hub_name, looks_like_path, unknown, weights_path
from ftlaunch.store.progress import Message, Progress
from ftlaunch.store.wishes import Pulled, Wishes

__all__ = ["Pulled", "Wishes", "pull"]


@owner_writes()
def pull(
    name: str,
    on_progress: Progress = lambda stage, done: None,
    on_message: Message = lambda text: None,
    *,
    wishes: Wishes | None = None,
    observe: Observer | None = None,
) -> Pulled:
    """Make sure that `name` is on this machine, complete. Raises FtError with what to do when that cannot be.

    observe: takes all events; without it, on_progress and on_message take those that they can tell of.

    Of what is made, others may read what the umask lets them, and write nothing.
    """
    wishes = wishes or Wishes()
    observe = observe or _adapter(name, on_progress, on_message)
    check_path(wishes.to or paths.models(), "set FT_HOME to a folder with another name")
    entry = CATALOGUE.get(short_name(name) or "")
    if entry is not None and entry.module:
        return _make(short_name(name) or name, entry, wishes, observe)
    if looks_like_path(name):
        from ftlaunch.store.copy import take

        return take(name, _existing(name), wishes, observe)
    meant = hub_name(name)
    if meant is None:
        raise unknown(name)
    from ftlaunch.store.fetch import fetch

    return fetch(name, meant, wishes, observe)


def _existing(typed: str) -> Path:
    path = Path(canonical(typed))
    try:
        if path.is_dir() and (weights_path(path) != path or (path / "config.json").is_file()):
            return path
        if path.is_file() and path.name.lower().endswith(".gguf"):
            return path
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if exists:
        raise FtError(f"{typed} holds no config.json and no GGUF file, so it is not a model", "ft list")
    raise FtError(f"there is no directory or GGUF file {typed}", "ft pull demo, or ft pull org/name for one of the Hub")


def _make(name: str, entry: Entry, wishes: Wishes, observe: Observer) -> Pulled:
    if wishes.files or wishes.to is not None:
        raise FtError(f"{name} is made on this machine, for the store only", f"ft pull {name}")
    recipe = entry.recipe()
    with site(name, on_wait=lambda: observe(Said(f"Waiting for another ft that fetches {name}"))) as here:
        if manifest.is_complete(here.final, recipe.version()):
            return Pulled(name, here.final, fetched=False)
        for text in wishes.look(Path(name), 0):
            observe(Said(text))
        here.partial.mkdir()
        here.downloads.mkdir(exist_ok=True)
        recipe.build(
            here.partial,
            here.downloads,
            lambda stage, done: observe(Stage(stage, done)),
            lambda text: observe(Said(text)),
        )
        here.finish(manifest.Source("recipe", recipe.version(), requested=name))
        return Pulled(name, here.final, fetched=True)


def _adapter(name: str, on_progress: Progress, on_message: Message) -> Observer:
    def observe(event: Event) -> None:
        match event:
            case Said(text):
                on_message(text)
            case Stage(stage, done):
                on_progress(stage, done)
            case Moved(_, done, total):
                on_progress(f"Fetching {name}", done / max(1, total))
            case _:
                pass

    return observe
