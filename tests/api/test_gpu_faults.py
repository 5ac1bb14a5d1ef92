"""A GPU that fails under a whole server: front, engine process and a model that raises what torch and Triton raise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.sse_reader import frames
from tests.support.serving import SCRIPTED_CHECKPOINT, RunningServer, scripted_environment, serve

PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("faults")
    environment = {**scripted_environment(home), "FT_PLUGINS": "tests.support.failing"}
    with serve(SCRIPTED_CHECKPOINT, home, "--context", "512", environment=environment) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as opened:
        yield opened


def body(path: str, text: str, **more: Any) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": 40, **more}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 40, **more}


def health(client: httpx.Client) -> dict[str, Any]:
    return client.get("/health").json()


def wait_restarted(client: httpx.Client, restarts: int) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not (health(client)["restarts"] > restarts and health(client)["status"] == "ready"):
        assert time.monotonic() < deadline, health(client)
        time.sleep(0.05)
    return health(client)


@pytest.mark.parametrize("path", PATHS)
def test_memory_that_runs_out_is_the_requests_loss_alone(client: httpx.Client, path: str) -> None:
    before = health(client)
    answer = client.post(path, json=body(path, "EXHAUST-MEMORY"))
    assert answer.status_code == (529 if path == "/v1/messages" else 503)
    assert "ran out of memory" in answer.text
    assert client.post(path, json=body(path, "hello")).status_code == 200
    after = health(client)
    assert (after["engine_pid"], after["restarts"]) == (before["engine_pid"], before["restarts"])


LOSSES = [
    ("/v1/messages", "FAIL-A-LAUNCH"),
    ("/v1/chat/completions", "LOSE-THE-DEVICE"),
    ("/v1/responses", "LOSE-THE-DEVICE"),
]


@pytest.mark.parametrize(("path", "word"), LOSSES)
def test_a_lost_gpu_ends_the_stream_as_its_api_does_and_the_next_request_is_answered(
    server: RunningServer, client: httpx.Client, path: str, word: str
) -> None:
    before = health(client)
    with client.stream("POST", path, json=body(path, word, stream=True)) as response:
        last = list(frames(response.iter_bytes()))[-1]
    assert "error" in str(last.data)
    assert "Traceback" not in str(last.data)
    if path == "/v1/messages":
        assert last.event == "error"
    elif path == "/v1/responses":
        assert last.event == "response.failed"
    answer = client.post(path, json=body(path, "hello"))  # waits for the new engine
    assert answer.status_code == 200
    after = wait_restarted(client, before["restarts"])
    assert after["restarts"] == before["restarts"] + 1
    assert after["engine_pid"] != before["engine_pid"]
    assert after["pid"] == before["pid"] == server.pid
