"""Nothing of the start is left to do when the engine says that it is ready: the first request would wait for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftengine import wire
from tests.scheduler.spawn import EngineProcess
from tests.scheduler.tiny import write_checkpoint


def test_garbage_is_looked_for_before_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "collections"
    monkeypatch.setenv("COLLECTIONS", str(told))
    checkpoint = write_checkpoint(tmp_path / "model")
    with EngineProcess(checkpoint, plugins="tests.scheduler.collections_told", context=256) as engine:
        assert isinstance(engine.start(), wire.Ready)
        ready = time.monotonic()
        engine.stats()  # answered by the loop: whatever it does first is over
        first = float(told.read_text(encoding="ascii").split()[0])
    assert first < ready
