"""Asking a front in a test: bodies whose user text is a script for the scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.api.sse_reader import Frame, frames

TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}
ANSWER = "<think>hm</think>Héllo 😀"
CALL = '<call>{"name": "read", "arguments": {"path": "ä.txt"}}</call>'
PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/completions", "/v1/responses")


def script(**fields: Any) -> str:
    return json.dumps(fields)


def simple(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """The smallest body for each API that asks `text`."""
    if path == "/v1/responses":
        return {"input": text, **fields}
    if path == "/v1/completions":
        return {"prompt": text, "max_tokens": 4000, **fields}
    return {"messages": [{"role": "user", "content": text}], **fields}


def post(client: httpx.Client, path: str, body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Frame]:
    """All events of a streamed answer; comments left out."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [frame for frame in frames(response.iter_bytes()) if isinstance(frame, Frame)]
