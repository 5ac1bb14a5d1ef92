"""Two who write the same file at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ftengine.locks import locked


def beside_another(lock: Path, other: Callable[[], object], write: Callable[[], object]) -> None:
    """`other` writes while it holds the lock, `write` is called meanwhile and returns when it could."""
    thread = threading.Thread(target=write)
    with locked(lock):
        thread.start()
        thread.join(0.3)  # without a lock it is done by now
        other()
    thread.join(60)
    assert not thread.is_alive()
