"""/v1/chat/completions against OpenAI's published chunks, with reasoning_content as local servers add it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.sse_reader import Frame
from tests.api.talk import ANSWER, CALL, TOOL, post, script, simple, stream

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "read", "description": "reads", "parameters": TOOL}}]


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return simple(PATH, text, **fields)


def deltas(frames: list[Frame], choice: int = 0) -> list[dict[str, Any]]:
    entries = [entry for frame in frames[:-1] for entry in frame.data["choices"]]
    return [entry["delta"] for entry in entries if entry["index"] == choice]


def test_stream_of_reasoning_text_and_tool_call(client: httpx.Client) -> None:
    body = ask(script(say=ANSWER + CALL, cached=9), tools=TOOLS, stream_options={"include_usage": True})
    frames = stream(client, PATH, body)
    assert frames[-1].data == "[DONE]"
    assert all(frame.event is None for frame in frames)
    assert all(frame.data["object"] == "chat.completion.chunk" for frame in frames[:-1])
    parts = deltas(frames)
    assert parts[0] == {"role": "assistant", "content": ""}
    assert "".join(part.get("reasoning_content", "") for part in parts) == "hm"
    assert "".join(part.get("content", "") for part in parts) == "Héllo 😀"

    calls = [part["tool_calls"][0] for part in parts if "tool_calls" in part]
    assert calls[0]["type"] == "function"
    assert calls[0]["id"].startswith("call_")
    assert calls[0]["function"] == {"name": "read", "arguments": ""}
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"path": "ä.txt"}'

    finishes = [frame.data["choices"][0]["finish_reason"] for frame in frames[:-2]]
    assert finishes[-1] == "tool_calls"
    assert set(finishes[:-1]) == {None}
    last = frames[-2].data
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 9}
    assert usage["completion_tokens"] == len((ANSWER + CALL).encode()) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_no_usage_chunk_unless_asked_for(client: httpx.Client) -> None:
    frames = stream(client, PATH, ask(script(say="a")))
    assert all("usage" not in frame.data for frame in frames[:-1])


def test_whole_answer(client: httpx.Client) -> None:
    body = post(client, PATH, ask(script(say=ANSWER + CALL), tools=TOOLS))
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["role"], message["content"], message["reasoning_content"]) == ("assistant", "Héllo 😀", "hm")
    call = message["tool_calls"][0]
    assert (call["type"], call["function"]) == ("function", {"name": "read", "arguments": '{"path": "ä.txt"}'})
    only_call = post(client, PATH, ask(script(say=CALL), tools=TOOLS))["choices"][0]["message"]
    assert only_call["content"] is None


def test_tool_text_stays_text_without_tools(client: httpx.Client) -> None:
    message = post(client, PATH, ask(script(say="<call>x</call>")))["choices"][0]
    assert message["finish_reason"] == "stop"
    assert "tool_calls" not in message["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length(client: httpx.Client, field: str) -> None:
    choice = post(client, PATH, ask(script(say="abcdef"), **{field: 4}))["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "abcd")


def test_stop_string_cut_over_tokens_never_shows(client: httpx.Client) -> None:
    frames = stream(client, PATH, ask(script(say="abcXYZdef", size=1), stop="XYZ"))
    assert "".join(part.get("content", "") for part in deltas(frames)) == "abc"
    assert frames[-2].data["choices"][0]["finish_reason"] == "stop"
    held = stream(client, PATH, ask(script(say="abcXY", size=1), stop=["XYZ"]))
    assert "".join(part.get("content", "") for part in deltas(held)) == "abcXY"


def test_several_choices(client: httpx.Client) -> None:
    whole = post(client, PATH, ask(script(say="hi"), n=3))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in whole["choices"]} == {"hi"}
    assert whole["usage"]["completion_tokens"] == 3 * 3
    assert whole["usage"]["prompt_tokens"] == len("<user>" + script(say="hi") + "<end><assistant>")
    frames = stream(client, PATH, ask(script(say="hi", size=1), n=2, stream_options={"include_usage": True}))
    for choice in (0, 1):
        assert "".join(part.get("content", "") for part in deltas(frames, choice)) == "hi"
    assert frames[-2].data["usage"]["completion_tokens"] == 2 * 3


def test_logprobs_cover_every_token(client: httpx.Client) -> None:
    body = ask(script(say="héy"), logprobs=True, top_logprobs=2)
    content = post(client, PATH, body)["choices"][0]["logprobs"]["content"]
    assert len(content) == len("héy".encode())
    assert content[0]["token"] == "h"
    assert (content[0]["logprob"], content[0]["bytes"]) == (-0.5, [104])
    assert content[0]["top_logprobs"][1] == {"token": "<end>", "logprob": -9999.0, "bytes": list(b"<end>")}
    frames = stream(client, PATH, body)
    entries = [frame.data["choices"][0]["logprobs"] for frame in frames[:-1]]
    assert [token for entry in entries if entry for token in entry["content"]] == content


def test_custom_tool(client: httpx.Client) -> None:
    tools = [{"type": "custom", "custom": {"name": "patch", "description": "free"}}]
    say = '<call>{"name": "patch", "arguments": {"input": "a\\nb"}}</call>'
    call = post(client, PATH, ask(script(say=say), tools=tools))["choices"][0]["message"]["tool_calls"][0]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "a\nb"})
    frames = stream(client, PATH, ask(script(say=say), tools=tools))
    parts = [part["tool_calls"][0] for part in deltas(frames) if "tool_calls" in part]
    assert "".join(part["custom"]["input"] for part in parts) == "a\nb"


def test_what_opencode_and_openclaw_send_is_accepted(client: httpx.Client) -> None:
    body = ask(script(say="fine"), tools=TOOLS, tool_choice="auto", response_format={"type": "json_object"})
    body["messages"] = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "callab", "type": "function", "function": {"name": "read", "arguments": '{"a'}}],
        },
        {"role": "tool", "tool_call_id": "callab", "content": "result"},
        {"role": "tool", "tool_call_id": "unknown", "content": [{"type": "text", "text": "result"}]},
        {"role": "system", "content": "late"},
        *body["messages"],
    ]
    assert post(client, PATH, body)["choices"][0]["message"]["content"] == "fine"


def test_too_long_has_the_code_that_clients_look_for(client: httpx.Client) -> None:
    response = client.post(PATH, json=ask("x" * 5000, stream=True))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert error["message"].startswith("This model's maximum context length is 4096 tokens.")
