"""What the real agents were recorded to send, sent again: every request is answered, and every stream is whole.

The server is the real one with Qwen3.6's tokenizer and template; only the model's forward is a script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.serving import RunningServer, serve
from tests.support.streams import CHECKS, parse_sse
from tests.traces.conftest import CONTEXT
from tests.traces.recordings import Recording, recordings

CONCURRENT = 4
ENDED = {  # the whole script or its first 16 tokens
    "/v1/messages": {"end_turn", "max_tokens"},
    "/v1/chat/completions": {"stop", "length"},
    "/v1/responses": {"completed", "incomplete"},
}
NOT_REPLAYED = {"host", "connection", "content-length", "accept-encoding"}  # they belong to the connection


@pytest.fixture(scope="module")
def server(traced_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ("--context", str(CONTEXT), "--max-output-tokens", "16", "--max-running-requests", str(CONCURRENT))
    with serve(traced_checkpoint, tmp_path_factory.mktemp("serve"), *flags) as server:
        yield server


def send(client: httpx.Client, recording: Recording) -> httpx.Response:
    headers = {name: value for name, value in recording.headers.items() if name.lower() not in NOT_REPLAYED}
    return client.request(recording.method, recording.path, headers=headers, json=recording.body)


def problem(client: httpx.Client, recording: Recording) -> str | None:
    """Why this recording was not answered well, or None."""
    response = send(client, recording)
    if response.status_code != 200:
        return f"{recording.name}: {response.status_code} {response.text[:300]}"
    if recording.body is None:
        return None
    try:
        if recording.body.get("stream"):
            ended = CHECKS[recording.route](parse_sse(response.text))
        else:  # Claude asks once more without streaming after a stream that broke
            ended = response.json()["stop_reason"]
    except (AssertionError, KeyError, IndexError, ValueError) as error:
        return f"{recording.name}: {error!r} in an answer that ends with {response.text[-300:]!r}"
    return None if ended in ENDED[recording.route] else f"{recording.name}: ended with {ended}"


def client_of(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=120, trust_env=False)


def test_every_recording_is_answered(server: RunningServer) -> None:
    found = recordings()
    assert {recording.client for recording in found} == {"claude", "codex", "opencode", "openclaw"}
    with client_of(server) as client, ThreadPoolExecutor(CONCURRENT) as pool:
        problems = [found for found in pool.map(lambda recording: problem(client, recording), found) if found]
        tokens = client.get("/v1/stats").json()["tokens"]
    assert problems == []
    # Each request of a session begins with the one before it, whole or nearly so.
    assert tokens["cached"] > 0.8 * tokens["prompt"], tokens


def test_overlong_prompt_gets_the_error_its_client_understands(
    traced_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The recorded "toolong" requests with a context below their size; the title requests among them still fit."""
    flags = ("--context", "4096", "--max-output-tokens", "16")
    with serve(traced_checkpoint, tmp_path_factory.mktemp("short"), *flags) as server, client_of(server) as client:
        refused = []
        for recording in recordings("toolong"):
            if not (recording.body or {}).get("tools"):
                assert problem(client, recording) is None
                continue
            response = send(client, recording)
            assert response.status_code == 400, recording.name
            assert response.headers["content-type"].startswith("application/json")
            if recording.route == "/v1/messages":
                assert_messages_error(client, recording, response.json())
            else:
                assert response.json()["error"]["code"] == "context_length_exceeded"
                assert re.search(r"\b4096\b", response.json()["error"]["message"])
            refused.append(recording.client)
    assert set(refused) == {"claude", "codex", "opencode", "openclaw"}


def assert_messages_error(client: httpx.Client, recording: Recording, answer: dict[str, object]) -> None:
    """Claude reads the numbers out of the message; the first must be what the server itself counts."""
    counted = client.post("/v1/messages/count_tokens", json=recording.body).json()["input_tokens"]
    assert answer["type"] == "error"
    assert answer["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {counted} tokens > 4096 maximum",
    }
