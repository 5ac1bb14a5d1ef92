"""/v1/messages against Anthropic's published stream (the event order that Claude Code was seen to accept)."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import httpx

from tests.api.sse_reader import Frame
from tests.api.talk import ANSWER, CALL, TOOL, post, script, simple, stream

TOOLS = [{"name": "read", "description": "reads", "input_schema": TOOL}]


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 500, **simple("/v1/messages", text), **fields}


def names(frames: list[Frame]) -> list[str]:
    """Event names, pings left out; each must equal its data's type."""
    assert all(frame.event == frame.data["type"] for frame in frames)
    return [frame.event for frame in frames if frame.event != "ping"]


def test_stream_of_thinking_text_and_tool_call(client: httpx.Client) -> None:
    frames = stream(client, "/v1/messages", ask(script(say=ANSWER + CALL, cached=7), tools=TOOLS))
    order = [name for name, _ in groupby(names(frames))]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", *block, *block, *block, "message_delta", "message_stop"]

    start = next(frame.data["message"] for frame in frames if frame.event == "message_start")
    usage = start["usage"]
    assert (start["role"], start["content"], start["stop_reason"]) == ("assistant", [], None)
    assert usage["cache_read_input_tokens"] == 7
    total = usage["input_tokens"] + 7
    counted = post(client, "/v1/messages/count_tokens", ask(script(say=ANSWER + CALL, cached=7), tools=TOOLS))
    assert total == counted["input_tokens"]

    starts = [frame.data for frame in frames if frame.event == "content_block_start"]
    assert [data["index"] for data in starts] == [0, 1, 2]
    assert starts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1]["content_block"] == {"type": "text", "text": ""}
    call = starts[2]["content_block"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "read", {})

    deltas = [frame.data["delta"] for frame in frames if frame.event == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert "".join(delta.get("text", "") for delta in deltas) == "Héllo 😀"
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"path": "ä.txt"}'
    assert [delta["type"] for delta in deltas if "signature" in delta] == ["signature_delta"]

    end = next(frame.data for frame in frames if frame.event == "message_delta")
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == len((ANSWER + CALL).encode()) + 1  # and the end token


def test_whole_answer_equals_the_stream(client: httpx.Client) -> None:
    message = post(client, "/v1/messages", ask(script(say=ANSWER + CALL), tools=TOOLS))
    thinking, text, call = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Héllo 😀"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "read", {"path": "ä.txt"})
    assert message["stop_reason"] == "tool_use"
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "bytes-model")


def test_stop_reasons(client: httpx.Client) -> None:
    assert post(client, "/v1/messages", ask(script(say="a")))["stop_reason"] == "end_turn"
    short = post(client, "/v1/messages", ask(script(say="abcdef"), max_tokens=4))
    assert (short["stop_reason"], short["content"][0]["text"]) == ("max_tokens", "abcd")
    stopped = post(client, "/v1/messages", ask(script(say="one STOP two"), stop_sequences=["never", "STOP"]))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "STOP")
    assert stopped["content"] == [{"type": "text", "text": "one "}]


def test_stop_sequences_do_not_look_into_thinking_or_arguments(client: httpx.Client) -> None:
    say = '<think>STOP</think>text<call>{"name": "read", "arguments": {"path": "STOP"}}</call>'
    message = post(client, "/v1/messages", ask(script(say=say), stop_sequences=["STOP"], tools=TOOLS))
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["stop_reason"] == "tool_use"


def test_parallel_calls_unless_disabled(client: httpx.Client) -> None:
    two = ask(script(say=CALL + CALL), tools=TOOLS)
    assert len(post(client, "/v1/messages", two)["content"]) == 2
    one = {**two, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    message = post(client, "/v1/messages", one)
    assert (len(message["content"]), message["stop_reason"]) == (1, "tool_use")


def test_everything_claude_code_sends_is_accepted(client: httpx.Client) -> None:
    body = ask(
        script(say="fine"),
        metadata={"user_id": "{}"},
        thinking={"type": "adaptive", "display": "updates"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        safeguards=[{"type": "dangerous_tool_use", "classifier_context": {"v": 1}}],
        system=[{"type": "text", "text": "x-anthropic-billing-header: cc"}, {"type": "text", "text": "be good"}],
        tools=[
            *TOOLS,
            {"name": "DeferredToolPlaceholder", "input_schema": {"type": "object"}, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        ],
    )
    cache = {"type": "ephemeral"}
    body["messages"] = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": cache}]},
        {"role": "system", "content": "in the middle"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "q"}},
                {
                    "type": "tool_use",
                    "id": "toolu_2",
                    "name": "read",
                    "input": {"__unparsedToolInput": {"raw": '{"pa', "len": 4}},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "tool_reference", "tool_name": "DeferredToolPlaceholder"}],
                },
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "cache_control": cache},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                {"type": "something_new", "payload": [1, 2]},
            ],
        },
        *body["messages"],
    ]
    response = client.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "unheard-of-2030-01-01"})
    assert response.status_code == 200, response.text
    assert response.json()["content"][0]["text"] == "fine"


def test_one_text_block_and_a_plain_string_are_the_same_prompt(client: httpx.Client) -> None:
    plain = ask("x" * 50)
    blocks = {**plain, "messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 50}]}]}
    counts = [post(client, "/v1/messages/count_tokens", body)["input_tokens"] for body in (plain, blocks)]
    assert counts[0] == counts[1] == len("<user>" + "x" * 50 + "<end><assistant>")


def test_too_long_names_both_numbers_in_claude_codes_words(client: httpx.Client) -> None:
    response = client.post("/v1/messages", json=ask("x" * 5000, stream=True))
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    tokens = len("<user><end><assistant>") + 5000
    assert error["error"]["message"] == f"prompt is too long: {tokens} tokens > 4096 maximum"


def test_max_tokens_is_clamped_to_what_the_context_leaves(client: httpx.Client) -> None:
    text = script(say="z", repeat=5000) + " " * 3900
    prompt = post(client, "/v1/messages/count_tokens", ask(text))["input_tokens"]
    message = post(client, "/v1/messages", ask(text, max_tokens=1_000_000_000))
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 4096 - prompt
