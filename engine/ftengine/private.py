"""Folders that only this user can enter, made with every folder above them that is missing; and files and folders that
others may read, but not write to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODE = 0o700
OTHERS_WRITE = 0o022  # of group and others


def private_folder(folder: Path) -> Path:
    """The folder. What is made has mode 0700 whatever the umask; what was there stays as it is. Raises OSError.

    `Path.mkdir(mode, parents=True)` would give the mode to the last folder alone, and less of it under some umasks.
    """
    missing = []
    for path in (folder, *folder.parents):
        if path.exists():
            break
        missing.append(path)
    for path in reversed(missing):
        try:
            path.mkdir(MODE)
        except FileExistsError:  # another process was faster
            continue
        path.chmod(MODE)
    folder.mkdir(MODE, exist_ok=True)  # refuses what is there and no folder
    return folder


@contextmanager
def owner_writes() -> Iterator[None]:
    """Whatever the umask was: while the block runs, others cannot write to what this process makes, nor to what those
    that it starts make. The umask is the whole process's, and as before afterwards.
    """
    before = os.umask(MODE ^ 0o777)
    os.umask(before | OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(before)
