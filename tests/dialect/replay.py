"""Recorded sessions as conversations, and the answers in them as a model would have written them.

A recording holds the request and the streamed response. The response's reasoning, text and calls are what the model
"said"; `written` spells them in Qwen3.6's own form, which is what an engine would have generated. What the client then
sends back is the next recording, and it is not the same: arguments come re-serialised, with defaults, under other ids.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from ftengine.api.anthropic import request as anthropic
from ftengine.api.chat import request as chat
from ftengine.api.responses import request as responses
from ftengine.api.settings import Limits
from ftengine.api.translate import Notes
from ftengine.conversation import Conversation, Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd
from ftengine.conversation import ToolCallStart as Start
from tests.dialect.conftest import SHARED

TRACES = SHARED / "traces"
LIMITS = Limits()
_UNSCRUBBED = ("/home/dev/", "/home/user/")  # a path that the recordings keep where a stream's fragments divide it


@dataclass
class Said:
    """What one response held."""

    reasoning: str = ""
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # id, name, arguments as JSON text (or a freeform text)

    def events(self) -> list[Event]:
        events: list[Event] = [ReasoningDelta(self.reasoning)] if self.reasoning else []
        events += [TextDelta(self.text)] if self.text else []
        for index, (call_id, name, arguments) in enumerate(self.calls):
            events += [Start(index, call_id, name), ToolCallDelta(index, arguments), ToolCallEnd(index, arguments)]
        return events


@dataclass
class Step:
    """One request of a session and its answer."""

    name: str
    conversation: Conversation
    said: Said
    aborted: bool


def conversation_of(body: dict[str, Any], route: str) -> Conversation | None:
    """None: the request is not one for an answer."""
    if route == "/v1/messages":
        return anthropic.conversation(msgspec.convert(body, anthropic.MessagesRequest), LIMITS, Notes())
    if route == "/v1/chat/completions":
        return chat.conversation(msgspec.convert(body, chat.ChatRequest), LIMITS, Notes())
    if route == "/v1/responses":
        request = msgspec.convert(body, responses.ResponsesRequest)
        return responses.conversation(request, responses.input_items(request), LIMITS, Notes())[0]
    return None


@cache
def scenarios() -> tuple[str, ...]:
    """ "client/scenario" of every recording; none where there are no traces."""
    return tuple(sorted(str(path.relative_to(TRACES)) for path in TRACES.glob("*/*") if path.is_dir()))


def session(scenario: str) -> list[Step]:
    """Its requests for answers in order."""
    steps = []
    for path in sorted((TRACES / scenario).glob("*.json*")):
        raw = path.read_bytes()
        form = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        conversation = conversation_of(form["body"], form["path"]) if form["body"] else None
        if conversation is not None:
            response = form["response"] or {}
            said = said_in(response, form["path"])
            steps.append(Step(path.name.split(".")[0], conversation, said, bool(response.get("aborted"))))
    return steps


def said_in(response: dict[str, Any], route: str) -> Said:
    said = Said()
    calls: dict[Any, list[str]] = {}
    read = {"/v1/messages": _messages, "/v1/chat/completions": _chat, "/v1/responses": _responses}[route]
    for _, data in response.get("sse") or ():
        if isinstance(data, dict):
            read(data, said, calls)
    said.calls = [[call_id, name, arguments.replace(*_UNSCRUBBED)] for call_id, name, arguments in calls.values()]
    return said


def _messages(data: dict[str, Any], said: Said, calls: dict[Any, list[str]]) -> None:
    if data["type"] == "content_block_start" and data["content_block"]["type"] == "tool_use":
        calls[data["index"]] = [data["content_block"]["id"], data["content_block"]["name"], ""]
    elif data["type"] == "content_block_delta":
        delta = data["delta"]
        said.text += delta.get("text", "")
        said.reasoning += delta.get("thinking", "")
        if "partial_json" in delta:
            calls[data["index"]][2] += delta["partial_json"]


def _chat(data: dict[str, Any], said: Said, calls: dict[Any, list[str]]) -> None:
    for choice in data.get("choices", ()):
        delta = choice["delta"]
        said.text += delta.get("content") or ""
        said.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            known = calls.setdefault(call["index"], ["", "", ""])
            known[0] = known[0] or call.get("id", "")
            known[1] = known[1] or call["function"].get("name", "")
            known[2] += call["function"].get("arguments") or ""


def _responses(data: dict[str, Any], said: Said, calls: dict[Any, list[str]]) -> None:
    if data["type"] != "response.output_item.done":
        return
    item = data["item"]
    if item["type"] == "message":
        said.text += item["content"][0]["text"]
    elif item["type"] == "reasoning":
        said.reasoning += item["content"][0]["text"]
    elif item["type"] == "custom_tool_call":
        calls[data["output_index"]] = [item["call_id"], item["name"], json.dumps({"input": item["input"]})]
    else:
        calls[data["output_index"]] = [item["call_id"], item["name"], item["arguments"]]


def written(said: Said, *, in_reasoning: bool) -> str:
    """The answer in Qwen3.6's form, after a prompt that ends inside <think> or after an empty one."""
    text = f"{said.reasoning}\n</think>\n\n" if in_reasoning else ""
    text += said.text
    for position, (_, name, arguments) in enumerate(said.calls):
        text += ("\n" if position else "\n\n" if said.text else "") + _call(name, arguments)
    return text + "<|im_end|>"


def _call(name: str, arguments: str) -> str:
    parameters = ""
    for key, value in json.loads(arguments).items():
        parameters += f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
