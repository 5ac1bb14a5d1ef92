"""Leases on a shared background server: files that living processes hold locked.

A lease is a file under the server's lease folder, locked with flock by the process that uses the server. The
kernel drops the lock at any kind of death, so a crashed holder's lease ends with it. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from types import TracebackType

from ftengine.private import private_folder

_UNFINISHED = "."  # names that begin so are being made and are not leases yet


class Lease:
    """One held lease. A context manager; `release` may be called more than once."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def acquire(folder: str | Path) -> Lease:
    """Hold a new lease in `folder`, which is made if needed (0700).

    The descriptor is not inherited by programs that this process starts: a lease lives as long as its holder.
    """
    folder = private_folder(Path(folder))
    name = f"{os.getpid()}-{secrets.token_hex(8)}"
    # Locked under a name that `held` passes over, then renamed: nobody sees a lease that is not locked yet.
    draft = folder / (_UNFINISHED + name)
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = draft.rename(folder / name)
    except BaseException:
        os.close(descriptor)
        raise
    return Lease(path, descriptor)


def held(folder: str | Path) -> int:
    """How many leases in `folder` are held now. Files of dead holders are removed; a missing folder holds none."""
    try:
        paths = list(Path(folder).iterdir())
    except FileNotFoundError:
        return 0
    return sum(_is_held(path) for path in paths if not path.name.startswith(_UNFINISHED))


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # released since it was listed, or not a plain file
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        with contextlib.suppress(OSError):
            path.unlink()
        return False
    finally:
        os.close(descriptor)
