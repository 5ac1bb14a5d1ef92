"""Files and directories that must be whole or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path

BLOCK = 1 << 20
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Put a file or a directory's entries on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def remove(path: Path) -> None:
    """Remove a file, a link (never what it points to) or a whole directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
