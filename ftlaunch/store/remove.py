"""Taking a model out of the store: all that is its own there, and nothing beyond."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import FtError
from ftengine.locks import locked
from ftlaunch import paths
from ftlaunch.store import hf_cache, used
from ftlaunch.store.catalogue import short_name
from ftlaunch.store.files import remove, sync
from ftlaunch.store.listing import BUILT, FETCHED, REPLACED, tree_bytes
from ftlaunch.store.names import canonical, hub_name, is_store_name, looks_like_path, unknown

REMOVED = ".removed-"
LEFTOVERS = (FETCHED, BUILT, REPLACED)  # of interrupted pulls


@dataclass(frozen=True)
class Removal:
    """bytes: what will be free. link: the model is a link, and only the link goes."""

    name: str
    path: Path
    bytes: int
    link: str | None = None


def plan(name: str) -> Removal:
    """Raises FtError: no such model in the store, or a server uses it."""
    path = _folder(name)
    if path is None:
        raise _not_in_store(name)
    _check_unused(path)
    link = str(path.readlink()) if path.is_symlink() else None
    own = [path, *(path.with_name(prefix + path.name) for prefix in LEFTOVERS)]
    size = tree_bytes(*(item for item in own if item.is_dir() and not item.is_symlink()))
    return Removal(canonical(name), path, size, link)


def carry_out(removal: Removal, on_wait: Callable[[], None] = lambda: None) -> None:
    """The model leaves the listing at once, by a rename; then its bytes go. A pull that is at it is waited for."""
    root, name = removal.path.parent, removal.path.name
    with locked(root / f".lock-{name}", on_wait):
        _check_unused(removal.path)
        for leftover in root.glob(f"{REMOVED}*"):
            remove(leftover)
        if os.path.lexists(removal.path):
            leaving = root / f"{REMOVED}{name}"
            removal.path.rename(leaving)
            sync(root)
            remove(leaving)
        for prefix in LEFTOVERS:
            remove(root / f"{prefix}{name}")
        note = used.record_path(removal.name)
        if note is not None:
            remove(note)


def _folder(name: str) -> Path | None:
    """The model's place in the store, if it or anything of it is there: a dangling link and a download count too."""
    meant = hub_name(name)
    for folder in (name.partition("@")[0], short_name(name), None if meant is None else meant.folder):
        if folder is not None and is_store_name(folder):
            path = paths.models() / folder
            if any(os.path.lexists(path.with_name(prefix + folder)) for prefix in ("", *LEFTOVERS)):
                return path
    return None


def _check_unused(path: Path) -> None:
    from ftlaunch.servers import running

    for server in running():
        served = paths.models() / server.model if looks_like_path(server.model) else _folder(server.model)
        if served is not None and (served == path or path in served.parents):
            name = canonical(path.name)
            raise FtError(f"{name} is being served at {server.url}", f"ft stop {name}, then ft rm {name}")


def _not_in_store(name: str) -> FtError:
    if looks_like_path(name):
        return FtError(f"{name} is not in the store: it is yours to remove", f"rm -r {name}")
    meant = hub_name(name)
    if meant is None:
        return unknown(name)
    if hf_cache.find(meant.repo) is None:
        return FtError(f"the store does not hold {name}", "ft list")
    return FtError(
        f"{meant.repo} lies in the Hugging Face cache, which other programs use too", f"hf cache rm model/{meant.repo}"
    )
