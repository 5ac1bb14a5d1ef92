"""When a model was last served: the time of an empty file `models/.used-<name>` beside it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ftlaunch import paths


def record(model: str) -> None:
    """Note that a model of the store or the Hugging Face cache is served now. Never fails: it is only a note."""
    path = record_path(model)
    if path is None or not path.parent.is_dir():
        return
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            os.utime(fd)
        finally:
            os.close(fd)


def when(model: str) -> float | None:
    """Unix time in seconds; None when it was never served."""
    path = record_path(model)
    try:
        return None if path is None else path.lstat().st_mtime
    except OSError:
        return None


def record_path(model: str) -> Path | None:
    """None for what is no name: directories elsewhere leave no trace here."""
    from ftlaunch.store.names import STORE_NAME, canonical

    name = canonical(model).partition("@")[0].replace("/", "--")
    return paths.models() / f".used-{name}" if STORE_NAME.fullmatch(name) else None
