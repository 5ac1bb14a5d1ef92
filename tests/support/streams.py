"""Whether a streamed answer is one that its API allows: the order of events, what must be balanced, how it ends.

Written from the clients' side, by what they were seen to need, and independently of the code that writes the streams.
Each check raises AssertionError and returns the reason for which the answer ended, in that API's own word.
"""

from __future__ import annotations

import json
from typing import Any

Event = tuple[str, Any]  # the event's name ("" when it has none) and its decoded data, "[DONE]" as it is


def parse_sse(text: str) -> list[Event]:
    """The events of a server-sent event stream; comments, which are heartbeats, are left out."""
    assert text.endswith("\n\n"), f"the stream was cut: ...{text[-80:]!r}"
    events = []
    for block in text.split("\n\n"):
        name, data = "", []
        for line in block.splitlines():
            if line.startswith("event:"):
                name = line[6:].strip()
            elif line.startswith("data:"):
                data.append(line[5:].strip())
            else:
                assert line.startswith(":"), f"not a line of an event stream: {line!r}"
        if data:
            joined = "\n".join(data)
            events.append((name, joined if joined == "[DONE]" else json.loads(joined)))
    return events


def check_messages(events: list[Event]) -> str:
    """Anthropic Messages. Returns the stop reason."""
    assert all(name == data["type"] for name, data in events), "an event's name differs from its type"
    events = [event for event in events if event[0] != "ping"]
    start = events[0][1]
    assert start["type"] == "message_start"
    assert start["message"]["role"] == "assistant"
    assert isinstance(start["message"]["usage"]["input_tokens"], int)
    opened: int | None = None
    blocks = 0
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert opened is None
            assert data["index"] == blocks
            opened, blocks = blocks, blocks + 1
        else:
            assert name in ("content_block_delta", "content_block_stop"), name
            assert data["index"] == opened
            opened = None if name == "content_block_stop" else opened
    assert opened is None, "a content block was not closed"
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    delta = events[-2][1]
    assert isinstance(delta["usage"]["output_tokens"], int)
    return str(delta["delta"]["stop_reason"])


def check_chat(events: list[Event]) -> str:
    """Chat Completions with include_usage. Returns the finish reason."""
    assert events[-1] == ("", "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    *choices, usage = chunks
    assert usage["choices"] == []
    counts = usage["usage"]
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in choices]
    assert all(reason is None for reason in reasons[:-1])
    assert choices[0]["choices"][0]["delta"]["role"] == "assistant"
    return str(reasons[-1])


def check_responses(events: list[Event]) -> str:
    """Responses. Returns the response's final status."""
    assert all(name == data["type"] for name, data in events), "an event's name differs from its type"
    names = [name for name, _ in events]
    numbers = [data["sequence_number"] for _, data in events]
    assert numbers == sorted(numbers)
    assert names[0] == "response.created"
    assert names[-1] in ("response.completed", "response.incomplete"), names[-1]
    added = [data["output_index"] for name, data in events if name == "response.output_item.added"]
    done = [data["output_index"] for name, data in events if name == "response.output_item.done"]
    assert added == done == list(range(len(added)))
    final = events[-1][1]["response"]
    items = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [item["id"] for item in final["output"]] == [item["id"] for item in items]
    assert final["usage"]["total_tokens"] == final["usage"]["input_tokens"] + final["usage"]["output_tokens"]
    return str(final["status"])


CHECKS = {
    "/v1/messages": check_messages,
    "/v1/chat/completions": check_chat,
    "/v1/responses": check_responses,
}
