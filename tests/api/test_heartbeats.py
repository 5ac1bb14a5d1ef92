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
SILENCE = 1.5  # seconds; busy cores may delay a beat, but never until the answer


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with front(tmp_path_factory.mktemp("quick") / "model", heartbeat_seconds=INTERVAL) as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_heartbeats_while_the_engine_is_silent(quick: FrontProcess, path: str) -> None:
    body = simple(path, script(say="done", hold=SILENCE), stream=True)
    begun = time.monotonic()
    with quick.client() as client, client.stream("POST", path, json=body) as response:
        assert time.monotonic() - begun < SILENCE / 2, "headers come before the answer is computed"
        arrivals, beats = [begun], 0
        for frame in frames(response.iter_bytes()):
            arrivals.append(time.monotonic())
            beats += _is_heartbeat(path, frame)
    assert beats >= SILENCE / INTERVAL / 2
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert max(gaps) < SILENCE - INTERVAL


def _is_heartbeat(path: str, frame: Frame | str) -> bool:
    if isinstance(frame, str):
        return frame == "keep-alive" and path in ("/v1/chat/completions", "/v1/completions")
    return frame.event == ("ping" if path == "/v1/messages" else "response.in_progress")
