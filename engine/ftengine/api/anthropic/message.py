"""Anthropic Messages: an answer as its JSON message."""

from __future__ import annotations

import secrets
from typing import Any

from ftengine.api.answer import Finished, Usage
from ftengine.api.collect import Collected, arguments_object
from ftengine.conversation import Reasoning, Text

# Clients keep a signature and send it back; here it proves nothing and any is accepted.
SIGNATURE = "bG9jYWw="


def message_id() -> str:
    return "msg_" + secrets.token_hex(12)


def message(identity: str, model: str, usage: Usage) -> dict[str, Any]:
    """The frame of a message, before its content."""
    return {
        "id": identity,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_body(usage),
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    """The prompt in three parts: read from the cache, written to it, and neither."""
    return {
        "input_tokens": usage.prompt - usage.cached - usage.kept,
        "cache_creation_input_tokens": usage.kept,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }


def stop(finished: Finished) -> dict[str, Any]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "stop_string": "stop_sequence"}
    return {"stop_reason": reasons[finished.reason], "stop_sequence": finished.stop_string}


def whole(answer: Collected, model: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for item in answer.items:
        if isinstance(item, Text):
            content.append({"type": "text", "text": item.text})
        elif isinstance(item, Reasoning):
            content.append({"type": "thinking", "thinking": item.text, "signature": SIGNATURE})
        else:
            content.append(
                {"type": "tool_use", "id": item.id, "name": item.name, "input": arguments_object(item.arguments)}
            )
    return {**message(message_id(), model, answer.end.usage), "content": content, **stop(answer.end)}
