"""Putting a model into the store, whole or not at all.

A model is built in `models/.partial-<name>` and gets its name by one rename, after its bytes are on the disk. One
process at a time works on a name; the lock is the kernel's and dies with its holder. `models/.fetch-<name>` keeps
downloads, so that an interrupted pull does not fetch again what it had. Names that begin with a dot are no models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ftengine.locks import locked
from ftlaunch import paths
from ftlaunch.store import manifest
from ftlaunch.store.files import DISK_ERRORS, remove, sync, sync_tree


@dataclass(frozen=True)
class Site:
    """Where one model is built while its lock is held."""

    name: str
    final: Path
    partial: Path  # becomes `final`
    downloads: Path  # kept until the model is complete

    def finish(self, source: manifest.Source, files: Mapping[str, manifest.File] | None = None) -> None:
        """Turn what was built in `partial` into the model. files: as recorded; None: hashed here."""
        manifest.write(self.partial, source, manifest.hash_files(self.partial) if files is None else files)
        sync_tree(self.partial)
        remove(self.final)
        self.partial.rename(self.final)
        sync(self.final.parent)
        remove(self.downloads)


@contextmanager
def site(name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[Site]:
    """An empty place to build `name` in, once no other process builds it. What an interrupted build left is removed."""
    root = paths.private(paths.models())
    with locked(root / f".lock-{name}", on_wait):
        here = Site(name, root / name, root / f".partial-{name}", root / f".fetch-{name}")
        remove(here.partial)
        try:
            yield here
        except OSError as error:
            if error.errno in DISK_ERRORS:
                remove(here.downloads)  # a full disk hurts more than a download that begins anew
            raise
        finally:
            remove(here.partial)
            with contextlib.suppress(OSError):
                here.downloads.rmdir()  # where nothing was fetched, nothing is left to go on with
