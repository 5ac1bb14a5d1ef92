"""A directory that appears under its name whole or not at all, written by one process at a time. Torch-free.

It is built beside its place as `.NAME.ft-partial` and gets its name by one rename. `.NAME.ft-lock` is a lock that the
kernel drops when its holder dies, however it dies; it holds the holder's process id. What an interrupted run left is
removed by the next one. No link is followed at any of these names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ftengine.errors import CheckpointError, FtError
from ftengine.weights.exchange import exchange
from ftengine.weights.ftw.header import read_header
from ftengine.weights.ftw.layout import HEADER_FILE
from ftengine.weights.ftw.writer import failure

ELSEWHERE = "give another --out"


class Destination:
    """While its lock is held. `partial` is an empty directory; `commit` makes it `final`."""

    def __init__(self, final: Path) -> None:
        self.final = final
        self.partial = _beside(final, "partial")
        self._old = _beside(final, "old")

    def begin(self) -> None:
        with _told(self.final):
            if not os.path.lexists(self.final) and self._old.is_dir() and not self._old.is_symlink():
                self._old.rename(self.final)  # an interrupted `_swap` where two names cannot be exchanged at once
            check_replaceable(self.final)
            self.clear()
            self.partial.mkdir()

    def commit(self) -> None:
        """The files are on the disk already. Raises FtError if something else took the place meanwhile."""
        with _told(self.final):
            check_replaceable(self.final)
            _sync(self.partial)
            if os.path.lexists(self.final):
                self._swap()
            else:
                self.partial.rename(self.final)
            _sync(self.final.parent.resolve())  # the user's own choice, which may be a link

    def clear(self) -> None:
        """Removes what is not `final`."""
        for path in (self.partial, self._old):
            for _ in range(8):  # someone else may be removing the same files
                with contextlib.suppress(FileNotFoundError):
                    _remove(path)
                    break

    def _swap(self) -> None:
        if not exchange(self.partial, self.final):
            self.final.rename(self._old)
            self.partial.rename(self.final)
            return
        try:
            check_replaceable(self.partial)  # what stood there at that very moment, not when it was looked at
        except FtError:
            exchange(self.partial, self.final)
            raise


@contextlib.contextmanager
def destination(out: Path, on_wait: Callable[[str], None] = lambda text: None) -> Iterator[Destination]:
    """An empty directory that can become `out`. `on_wait` is told who has it, if another process does.

    Raises FtError when `out` is something that must not be replaced.
    """
    final = Path(os.path.abspath(out))  # noqa: PTH100 - resolve() would follow the link that `out` may be
    parent = final.parent
    if not parent.is_dir():
        raise FtError(f"there is no directory {parent}", f"mkdir -p {parent}")
    if not final.name:
        raise FtError(f"{final} cannot be replaced", ELSEWHERE)
    check_replaceable(final)
    with _locked(_beside(final, "lock"), final, on_wait):
        here = Destination(final)
        here.begin()
        try:
            yield here
        finally:
            here.clear()


@contextlib.contextmanager
def _told(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failure(error, Path(error.filename or final)) from error


def check_replaceable(out: Path) -> None:
    """Absent, an empty directory, or an FTW directory with nothing else in it. Raises FtError."""
    if out.is_symlink():
        raise FtError(f"{out} is a symbolic link, which is not followed", "give the directory itself as --out")
    if not os.path.lexists(out):
        return
    try:
        found = {path.name for path in out.iterdir()}
    except NotADirectoryError:
        raise FtError(f"{out} exists and is not a directory", ELSEWHERE) from None
    except FileNotFoundError:  # somebody has just removed it
        return
    if not found:
        return
    if HEADER_FILE not in found:
        raise FtError(f"{out} exists and is not an FTW directory, so it is not replaced", ELSEWHERE)
    try:
        header = read_header(out)
        known = {HEADER_FILE, *(file.name for file in header.files), *(file.name for file in header.attachments)}
    except CheckpointError:  # a damaged one is what a new conversion is for
        known = {name for name in found if name == HEADER_FILE or name.endswith((".ftw", ".json", ".jinja", ".txt"))}
    others = sorted(found - known)
    if others:
        raise FtError(f"{out} holds {others[0]}, which is no part of it, so it is not replaced", ELSEWHERE)


def _beside(final: Path, role: str) -> Path:
    return final.with_name(f".{final.name}.ft-{role}")


@contextlib.contextmanager
def _locked(path: Path, out: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    while True:
        with _told(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            _lock(descriptor, out, on_wait)
            if not _is(path, descriptor):  # the one who had it removed it
                continue
            try:
                with _told(path):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, out: Path, on_wait: Callable[[str], None]) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise FtError(f"the lock beside {out} is not a regular file", ELSEWHERE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        who = f"process {holder}" if holder.isdecimal() else "another process"
        on_wait(f"Waiting for {who}, which is writing {out}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is(path: Path, descriptor: int) -> bool:
    try:
        named = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
