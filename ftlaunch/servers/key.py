"""The key of servers started in the background: one for each FT_HOME, so that an agent which outlives its server is
answered by the next one on that port, and not told to log in somewhere."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from ftlaunch import paths

KEY = re.compile(r"[A-Za-z0-9_-]{32,128}")


def key_path() -> Path:
    return paths.run() / "key"


def shared_key() -> str:
    """The key, made at the first call. The file is readable by its owner only; call with the start lock held."""
    path = key_path()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        pass
    else:
        with os.fdopen(fd) as file:
            private = os.fstat(fd).st_mode & 0o077 == 0
            known = file.read(256).strip() if private else ""
        if KEY.fullmatch(known):
            return known
    key = secrets.token_urlsafe(32)
    paths.write_private(path, key)
    return key
