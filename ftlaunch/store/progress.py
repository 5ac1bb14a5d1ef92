"""Telling how far a fetch is when the program that fetches does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str, float], None]  # stage, fraction 0..1
Message = Callable[[str], None]


@contextmanager
def watched(directory: Path, expected: int, stage: str, on_progress: Progress) -> Iterator[None]:
    """Report the growth of `directory` towards `expected` bytes while the block runs."""
    done = threading.Event()
    before = _bytes(directory)

    def watch() -> None:
        while not done.wait(0.2):
            on_progress(stage, min(1.0, (_bytes(directory) - before) / expected))

    on_progress(stage, 0.0)
    watcher = threading.Thread(target=watch, name="watch-download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            if not path.is_symlink() and path.is_file():
                total += path.stat().st_size
        except OSError:  # it was renamed or removed meanwhile
            continue
    return total
