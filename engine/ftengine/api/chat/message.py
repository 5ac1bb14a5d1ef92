"""Chat Completions: answers as one JSON body."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from ftengine.api.answer import Finished
from ftengine.api.collect import Collected, freeform_text
from ftengine.api.openai import chat_logprobs, chat_usage, now
from ftengine.conversation import Reasoning, Text, ToolCall


def completion_id() -> str:
    return "chatcmpl-" + secrets.token_hex(12)


def finish_reason(finished: Finished) -> str:
    return "stop" if finished.reason == "stop_string" else finished.reason


def tool_call(call: ToolCall, freeform: frozenset[str]) -> dict[str, Any]:
    """`freeform`: names of the tools that take text instead of arguments."""
    if call.name in freeform:
        custom = {"name": call.name, "input": freeform_text(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def whole(
    answers: list[Collected], model: str, freeform: frozenset[str], token_text: Callable[[int], str], logprobs: bool
) -> dict[str, Any]:
    choices = []
    for index, answer in enumerate(answers):
        text, reasoning, calls = answer.joined(Text), answer.joined(Reasoning), answer.calls()
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [tool_call(call, freeform) for call in calls]
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(answer.logprobs, token_text) if logprobs else None,
                "finish_reason": finish_reason(answer.end),
            }
        )
    return {
        "id": completion_id(),
        "object": "chat.completion",
        "created": now(),
        "model": model,
        "choices": choices,
        "usage": chat_usage([answer.end.usage for answer in answers], answers_per_prompt=len(answers)),
    }
