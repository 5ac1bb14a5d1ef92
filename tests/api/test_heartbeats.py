"""Silence is filled with what each client counts as life; headers come before prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.api.fronts import FrontProcess, front
from tests.api.sse_reader import Frame, frames
from tests.api.talk import PATHS, script, simple

INTERVAL = 0.25
MOST = 100  # beats to wait for two that are near each other


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with front(tmp_path_factory.mktemp("quick") / "model", heartbeat_seconds=INTERVAL) as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_heartbeats_while_the_engine_is_silent(quick: FrontProcess, path: str) -> None:
    """Headers and beats come while it waits for a gate that is opened only after them."""
    (quick.folder / "gate").unlink(missing_ok=True)
    body = simple(path, script(say="done", gate=True), stream=True)
    with quick.client() as client, client.stream("POST", path, json=body) as response:
        beats: list[float] = []
        for frame in frames(response.iter_bytes()):
            if not _is_heartbeat(path, frame):
                continue
            beats.append(time.monotonic())
            gaps = [later - earlier for earlier, later in pairwise(beats)]
            if len(beats) >= MOST or (len(beats) >= 3 and min(gaps) < 2 * INTERVAL):
                quick.open_gate()
    assert len(beats) >= 3
    assert 0 < min(gaps) < 2 * INTERVAL


def _is_heartbeat(path: str, frame: Frame | str) -> bool:
    if isinstance(frame, str):
        return frame == "keep-alive" and path in ("/v1/chat/completions", "/v1/completions")
    return frame.event == ("ping" if path == "/v1/messages" else "response.in_progress")
