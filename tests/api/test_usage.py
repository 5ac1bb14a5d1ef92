"""Reuse in each API's own fields and in the log.

The meanings are the vendors': Anthropic's three input counts are parts of one whole (read from the cache, written to
it, neither); OpenAI's cached tokens are part of the prompt's.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.fronts import FrontProcess, until
from tests.api.talk import post, script, simple, stream

REUSED = {"tier": "host", "kind": "call_end", "changed": 9}


def asked(path: str, **fields: Any) -> tuple[dict[str, Any], int]:
    """A body whose prompt had 7 tokens in the cache, and how many tokens that prompt has."""
    text = script(say="abc", cached=7, **fields)
    prompt = text if path == "/v1/completions" else f"<user>{text}<end><assistant>"
    return simple(path, text), len(prompt)


def messages_usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"], usage["input_tokens"]


def test_messages(client: httpx.Client) -> None:
    """All but the prompt's last token, which is computed each time, is in the cache afterwards."""
    body, prompt = asked("/v1/messages", reused=REUSED)
    parts = (7, prompt - 8, 1)
    assert messages_usage(post(client, "/v1/messages", body)["usage"]) == parts
    frames = stream(client, "/v1/messages", body)
    start = next(frame.data["message"] for frame in frames if frame.event == "message_start")
    end = next(frame.data for frame in frames if frame.event == "message_delta")
    assert messages_usage(start["usage"]) == messages_usage(end["usage"]) == parts
    assert (start["usage"]["output_tokens"], end["usage"]["output_tokens"]) == (0, len("abc") + 1)
    counted = post(client, "/v1/messages/count_tokens", body)["input_tokens"]
    assert sum(parts) == counted == prompt


def test_messages_without_a_cache(client: httpx.Client) -> None:
    body, prompt = asked("/v1/messages")
    assert messages_usage(post(client, "/v1/messages", body)["usage"]) == (7, 0, prompt - 7)


def test_message_start_comes_before_the_first_token(client: httpx.Client) -> None:
    """Its numbers are right at once: the engine tells them when prefill starts."""
    body, prompt = asked("/v1/messages", reused=REUSED, delay=30)
    with client.stream("POST", "/v1/messages", json={**body, "stream": True}) as response:
        seen = ""
        for piece in response.iter_text():
            seen += piece
            if "message_start" in seen:
                break
    assert f'"cache_creation_input_tokens":{prompt - 8},"cache_read_input_tokens":7' in seen


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_chat_and_completions(client: httpx.Client, path: str) -> None:
    body, prompt = asked(path, reused=REUSED)
    body["max_tokens"] = 500
    whole = post(client, path, body)["usage"]
    streamed = stream(client, path, {**body, "stream_options": {"include_usage": True}})[-2].data["usage"]
    assert whole == streamed
    assert (whole["prompt_tokens"], whole["prompt_tokens_details"]) == (prompt, {"cached_tokens": 7})
    assert whole["total_tokens"] == prompt + whole["completion_tokens"] == prompt + 4


def test_responses(client: httpx.Client) -> None:
    body, prompt = asked("/v1/responses", reused=REUSED)
    whole = post(client, "/v1/responses", body)["usage"]
    streamed = stream(client, "/v1/responses", body)[-1].data["response"]["usage"]
    assert whole == streamed
    assert (whole["input_tokens"], whole["input_tokens_details"]) == (prompt, {"cached_tokens": 7})
    assert whole["total_tokens"] == prompt + whole["output_tokens"] == prompt + 4


@pytest.mark.parametrize(
    ("reused", "text"),
    [
        (REUSED, "(7 reused from host at call_end, new from 9)"),
        ({"tier": "device", "changed": 7}, "(7 reused from device, new from 7)"),
        ({"tier": "disk", "kind": "prompt_end", "changed": 0}, "(7 reused from disk at prompt_end, new from 7)"),
        (None, "(7 cached)"),
    ],
)
def test_one_line_an_answer_says_what_was_reused(
    shared_front: FrontProcess, client: httpx.Client, reused: dict[str, Any] | None, text: str
) -> None:
    body, prompt = asked("/v1/chat/completions", **({"reused": reused} if reused else {}))
    title = {**body, "messages": [{"role": "system", "content": "Titles"}, *body["messages"]]}
    before = len(shared_front.log().splitlines())
    post(client, "/v1/chat/completions", body)
    response = client.post("/v1/chat/completions", json=title, headers={"x-session-id": f"ses_{text}"})
    assert response.status_code == 200

    def told(what: str) -> list[str]:
        """Lines since then; those of other tests' requests that end late are among them."""
        return [line for line in shared_front.log().splitlines()[before:] if what in line]

    until(lambda: told(" beside: prompt ") != [])
    (beside,) = told(" beside: prompt ")
    assert f"{text}, output 4," in beside
    assert "ses_" not in beside
    assert told(f"chat 127.0.0.1: prompt {prompt} {text}, output 4,") != []
