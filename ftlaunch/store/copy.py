"""A model folder or a GGUF file of this machine, taken into the store.

The files are cloned where the file system shares blocks between files (btrfs, XFS), and copied elsewhere. They are
never hard links: what a person later changes in the folder would change the store's verified model too. Serving a
folder where it is takes no pull at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ftengine.errors import CheckpointError, FtError
from ftlaunch.store import manifest
from ftlaunch.store.catalogue import CATALOGUE
from ftlaunch.store.events import Complete, Moved, Observer, Planned, Said
from ftlaunch.store.filenames import shown
from ftlaunch.store.hub.limits import BLOCK
from ftlaunch.store.hub.part import write_all
from ftlaunch.store.hub.selection import INDEX, PART, is_text, is_weight
from ftlaunch.store.names import STORE_NAME, weights_path
from ftlaunch.store.place import Place, place
from ftlaunch.store.wishes import Pulled, Wishes, check_disk

FICLONE = 0x40049409  # ioctl(2) FICLONE: the target shares the source's blocks until either is written to
FTW_ENDINGS = (".ftw",)


def take(typed: str, path: Path, wishes: Wishes, observe: Observer) -> Pulled:
    """`path`: a model's directory, or a GGUF file. Raises FtError for what is no model."""
    if wishes.files:
        raise FtError("--files chooses among a repository's files; a folder is taken whole", f"ft pull {typed}")
    files = _gguf_parts(path) if path.is_file() else _files(path, typed)
    _check_headers(files, typed)
    name = _name(path)
    kind: manifest.Kind = "gguf" if path.is_file() else "directory"
    wait: Callable[[], None] = lambda: observe(Said(f"Waiting for another ft that fetches {name}"))  # noqa: E731
    with place(name, wishes.to, wait) as here:
        _check_owner(here, name, str(path), typed)
        here.keep(set())
        sizes = {file.name: file.stat().st_size for file in files}
        observe(Planned(name, "", len(files), sum(sizes.values()), 0))
        try:
            status = os.fstatvfs(here.root.fd)
            check_disk(here.root.path, status.f_bavail * status.f_frsize, sum(sizes.values()))
            records = _Copy(here, sizes, observe).run(files)
        except BaseException:
            here.forget()
            raise
        here.finish(manifest.Source(kind, str(path)), {name: (name, record) for name, record in records.items()})
        return Pulled(name, weights_path(here.final), fetched=True)


def _gguf_parts(path: Path) -> list[Path]:
    """All files of a split model, whichever of them was named."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    parts = [path.with_name(f"{match[1]}-{n:05d}-of-{match[3]}.gguf") for n in range(1, min(int(match[3]), 9999) + 1)]
    missing = next((part for part in parts if not part.is_file()), None)
    if missing is not None:
        raise FtError(f"{missing} is missing: the model is split into {len(parts)} files", "bring all of them")
    return parts


def _files(directory: Path, typed: str) -> list[Path]:
    from ftengine.weights.checkpoint import Checkpoint
    from ftengine.weights.ftw.header import is_ftw, read_header

    if weights_path(directory) != directory:
        return sorted(file for file in directory.iterdir() if file.name.lower().endswith(".gguf") and file.is_file())
    try:
        checkpoint = Checkpoint.open(directory)
        if is_ftw(directory):
            read_header(directory)
        else:
            checkpoint.tensors()
    except CheckpointError as error:
        raise FtError(f"{typed} is no model that can be taken: {error}", error.next_step) from None
    return sorted(file for file in directory.iterdir() if file.is_file() and _is_wanted(file.name))


def _check_headers(files: list[Path], typed: str) -> None:
    """Of GGUF files. Raises FtError for a damaged one, before it is copied."""
    from ftengine.weights.gguf_header import read_gguf_header

    try:
        for file in files:
            if file.name.lower().endswith(".gguf"):
                read_gguf_header(file)
    except CheckpointError as error:
        raise FtError(f"{typed} is no model that can be taken: {error}", error.next_step) from None


def _is_wanted(name: str) -> bool:
    known = is_weight(name) or is_text(name) or name == INDEX or name.endswith(FTW_ENDINGS)
    return known and name != manifest.NAME


def _name(path: Path) -> str:
    name = path.name
    if path.is_file():
        match = PART.fullmatch(name)
        name = match[1] if match else path.stem
    if STORE_NAME.fullmatch(name) is None or "--" in name or name in CATALOGUE:
        raise FtError(f"{shown(name)} cannot be a model's name in the store", "rename it, or give --to DIR")
    return name


def _check_owner(here: Place, name: str, source: str, typed: str) -> None:
    """A model of the same name from elsewhere is not replaced."""
    if not here.root.exists(here.final.name):
        return
    written = manifest.read(here.final)
    if written is None or written.source.repo != source:
        raise FtError(f"{here.final} is another model", f"ft rm {name} first, or ft pull {typed} --to DIR")


class _Copy:
    def __init__(self, here: Place, sizes: dict[str, int], observe: Observer) -> None:
        self._here = here
        self._sizes = sizes
        self._observe = observe
        self._done = 0
        self._buffer = memoryview(bytearray(BLOCK))

    def run(self, files: list[Path]) -> dict[str, manifest.File]:
        return {file.name: self._copy(file) for file in files}

    def _copy(self, file: Path) -> manifest.File:
        work = self._here.work
        source = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with closing(os.fdopen(source, "rb", buffering=0)) as reading:
            if not stat.S_ISREG(os.fstat(source).st_mode):
                raise FtError(f"{file} is not an ordinary file", "take it out of the folder")
            target = work.open(file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            with closing(os.fdopen(target, "r+b", buffering=0)):
                cloned = _clone(source, target)
                digest, size = hashlib.sha256(), 0
                while count := reading.readinto(self._buffer):
                    if not cloned:
                        write_all(target, self._buffer[:count], size)
                    digest.update(self._buffer[:count])
                    size += count
                    self._done += count
                    under_way = {file.name: (size, self._sizes[file.name])}
                    self._observe(Moved(under_way, self._done, sum(self._sizes.values())))
                os.fsync(target)
        self._observe(Complete(file.name, digest.hexdigest()))
        return manifest.File(size, digest.hexdigest())


def _clone(source: int, target: int) -> bool:
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.ioctl(target, FICLONE, source)
        return True
    return False
