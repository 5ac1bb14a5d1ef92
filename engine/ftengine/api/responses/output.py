"""Responses: output items and the response object around them."""

from __future__ import annotations

import secrets
from typing import Any

from ftengine.api.answer import Finished, Usage
from ftengine.api.collect import Collected, freeform_text
from ftengine.api.openai import now
from ftengine.api.responses.request import ResponsesRequest
from ftengine.api.responses.tools import Tools
from ftengine.conversation import Reasoning, Text, ToolCall


def identity(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def reasoning_item(item_id: str, text: str | None) -> dict[str, Any]:
    """`text` None: the item as it is announced, empty."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "encrypted_content": None}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [text_part(text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def call_item(item_id: str, call: ToolCall, tools: Tools, status: str) -> dict[str, Any]:
    """`call.name` is the flat name that the model used; the client gets its own back."""
    origin = tools.origin(call.name)
    item: dict[str, Any] = {"id": item_id, "call_id": call.id, "name": origin.name, "status": status}
    if origin.namespace is not None:
        item["namespace"] = origin.namespace
    if origin.freeform:
        return {"type": "custom_tool_call", **item, "input": freeform_text(call.arguments)}
    return {"type": "function_call", **item, "arguments": call.arguments}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


class ResponseFrame:
    """The response object of one request, in any of its states."""

    def __init__(self, body: ResponsesRequest, model: str) -> None:
        self._fields: dict[str, Any] = {
            "id": identity("resp"),
            "object": "response",
            "created_at": now(),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],  # not repeated: they may be tens of kilobytes, and this goes out with every heartbeat
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def running(self) -> dict[str, Any]:
        return self._fields

    def finished(self, output: list[dict[str, Any]], finished: Finished) -> dict[str, Any]:
        short = finished.reason == "length"
        return {
            **self._fields,
            "status": "incomplete" if short else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "output": output,
            "usage": usage_body(finished.usage),
        }

    def failed(self, output: list[dict[str, Any]], code: str, message: str) -> dict[str, Any]:
        return {**self._fields, "status": "failed", "output": output, "error": {"code": code, "message": message}}


def whole(answer: Collected, frame: ResponseFrame, tools: Tools) -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    for item in answer.items:
        if isinstance(item, Text):
            output.append(message_item(identity("msg"), item.text, "completed"))
        elif isinstance(item, Reasoning):
            output.append(reasoning_item(identity("rs"), item.text))
        else:
            prefix = "ctc" if tools.origin(item.name).freeform else "fc"
            output.append(call_item(identity(prefix), item, tools, "completed"))
    if answer.end.reason == "length" and output and "status" in output[-1]:
        output[-1]["status"] = "incomplete"
    return frame.finished(output, answer.end)
