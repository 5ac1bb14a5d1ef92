"""Where one model is put together, held by descriptors from beginning to end.

`.fetch-<name>` keeps what an interrupted pull has brought; `.partial-<name>` is filled with links to it and renamed;
`.old-<name>` is the model that was there before, for the moment between two renames, where two names cannot be
exchanged at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ftengine.errors import FtError
from ftengine.locks import locked
from ftlaunch import paths
from ftlaunch.store import manifest
from ftlaunch.store.files import DISK_ERRORS
from ftlaunch.store.folder import Folder


class Place:
    """Made by `place`, which holds the model's lock."""

    def __init__(self, root: Folder, name: str) -> None:
        self.root = root
        self.final = root.path / name
        self._name = name
        self._work: Folder | None = None

    @property
    def work(self) -> Folder:
        """What arrives lies here until the model is whole."""
        if self._work is None:
            self._work = self.root.child(f".fetch-{self._name}")
        return self._work

    def recover(self) -> None:
        """Undo what a killed process left of its last steps."""
        if self.root.exists(f".old-{self._name}") and not self.root.exists(self._name):
            self.root.rename(f".old-{self._name}", self.root, self._name)
        self._clear(f".partial-{self._name}", f".old-{self._name}")

    def keep(self, wanted: set[str]) -> None:
        """Remove from the work folder all that no file of the model needs."""
        for name in self.work.names():
            if name.removesuffix(".part").removesuffix(".blocks") not in wanted:
                self.work.remove(name)

    def finish(self, source: manifest.Source, files: Mapping[str, tuple[str, manifest.File]]) -> None:
        """Make the model of the work folder's files. files: name -> (its name in the work folder, the record)."""
        partial = f".partial-{self._name}"
        self._clear(partial)
        with self.root.child(partial) as folder:
            for name, (key, _) in files.items():
                self.work.link(key, folder, name.rpartition("/")[2])
            manifest.write(
                folder.as_path(), source, {name.rpartition("/")[2]: record for name, (_, record) in files.items()}
            )
            folder.sync()
        self._swap(partial)
        self.root.sync()
        self._clear(partial, f".old-{self._name}")
        self.forget()

    def _swap(self, partial: str) -> None:
        """Give `partial` the model's name. The old model, if there is one, is then `.partial-` or `.old-`."""
        old = f".old-{self._name}"
        if not self.root.exists(self._name):
            self.root.rename(partial, self.root, self._name)
        elif not self.root.exchange(partial, self._name):
            self.root.rename(self._name, self.root, old)
            try:
                self.root.rename(partial, self.root, self._name)
            except OSError:
                self.root.rename(old, self.root, self._name)
                raise

    def forget(self) -> None:
        """Give back the space of what has arrived."""
        self.close()
        self._clear(f".fetch-{self._name}")

    def close(self) -> None:
        if self._work is not None:
            with self._work:
                self._work = None

    def _clear(self, *names: str) -> None:
        for name in names:
            self.root.remove(name)


@contextmanager
def place(name: str, to: Path | None, on_wait: Callable[[], None]) -> Iterator[Place]:
    """Of a model of the store, or, with `to`, of a directory anywhere that does not exist or was made by a pull."""
    store = paths.private(paths.models())
    if to is None:
        root, lock = store, f".lock-{name}"
    else:
        to = _checked(to)
        name, root, lock = to.name, to.parent, f".lock-to-{_number(str(to)):x}"
    with locked(store / lock, on_wait), Folder.at(root) as folder:
        here = Place(folder, name)
        here.recover()
        try:
            yield here
        except OSError as error:
            if error.errno in DISK_ERRORS:
                with contextlib.suppress(OSError):
                    here.recover()
                    here.forget()  # a full disk hurts more than a download that begins anew
            raise
        finally:
            here.close()


def _number(text: str) -> int:
    import zlib

    return zlib.crc32(text.encode("utf-8", "surrogateescape"))


def _checked(to: Path) -> Path:
    to = Path(os.path.abspath(to.expanduser()))  # noqa: PTH100 - resolve() would follow links
    if to.is_symlink():
        raise FtError(f"{to} is a link", f"give the directory itself: --to {to.resolve()}")
    if to.exists() and not to.is_dir():
        raise FtError(f"{to} is a file", "give a directory that does not exist yet")
    if to.is_dir() and any(to.iterdir()) and manifest.read(to) is None:
        raise FtError(f"{to} holds files that no pull has made", "give an empty directory, or one that does not exist")
    if not to.name:
        raise FtError(f"{to} cannot be replaced by a model", "give a directory below it")
    to.parent.mkdir(parents=True, exist_ok=True)
    return to
