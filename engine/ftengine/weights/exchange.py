"""Two directory entries change places at once, so that a name never stands for nothing (renameat2, Linux)."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2


def exchange(one: Path | str, other: Path | str, folder: int = AT_FDCWD) -> bool:
    """folder: a descriptor of the directory that relative names are looked up in. Links are not followed.

    False where the system or the file system cannot; raises OSError for every other failure.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(folder, os.fsencode(one), folder, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))
