"""Files that are whole or as they were, whatever happens meanwhile: a crash, a full disk, another writer."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

OWNER = stat.S_IRUSR | stat.S_IWUSR
DRAFT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def write_atomically(path: Path, data: bytes, *, mode: int | None = None, sync: bool = False) -> None:
    """Writes a draft beside it, which takes its place in one step. Its folder must be there; a link is not followed.

    mode: of the file, whatever the umask; None: what others may do with it stays as it is, and the umask decides for
    a new one. sync: the data are on the disk before the name leads to them; the folder's own sync is the caller's.
    Raises OSError that names the file, for a full disk does not say of which one; the draft is then removed.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")  # of no other writer, nor one that a crash has left
    try:
        wanted = _mode(path) if mode is None else mode
        fd = os.open(draft, DRAFT, 0o666 if wanted is None else wanted)
        try:
            with os.fdopen(fd, "wb") as file:
                if wanted is not None:
                    with contextlib.suppress(OSError):  # a file system without modes; more than `wanted` it never has
                        os.fchmod(fd, wanted)
                file.write(data)
                if sync:
                    file.flush()
                    os.fsync(fd)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _mode(path: Path) -> int | None:
    """Of a regular file, its owner's rights granted: who could not read the old one would not read the new one."""
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        return None
    return (stat.S_IMODE(found) & 0o777) | OWNER if stat.S_ISREG(found) else None
