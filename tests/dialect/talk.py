"""Conversations and answers in short form, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ftengine.conversation import (
    Conversation,
    Event,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolResult,
    ToolSpec,
)
from ftengine.dialect.answer.parser import AnswerParser, Grammar
from ftengine.dialect.tools import Toolbox

EVERYTHING = Grammar(json_calls=True, xml_calls=True, reasoning=True)

READ = ToolSpec(
    "read_file",
    "Reads a file.",
    {"type": "object", "properties": {"path": {"type": "string", "description": "Where."}}, "required": ["path"]},
)
WRITE = ToolSpec(
    "write_file",
    "Writes a file.",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": "integer"},
            "options": {"type": "object"},
        },
        "required": ["path", "content"],
    },
)
STATUS = ToolSpec("status", "Says how it stands.")
PATCH = ToolSpec("apply_patch", "Applies a patch.", freeform=True)
TOOLS = (READ, WRITE, STATUS, PATCH)


def say(role: Role, *parts: str | Part) -> Message:
    return Message(role, tuple(Text(part) if isinstance(part, str) else part for part in parts))


def call(call_id: str, name: str, arguments: str | dict[str, Any]) -> ToolCall:
    return ToolCall(call_id, name, arguments)


def result(call_id: str, text: str) -> Message:
    return say("tool", ToolResult(call_id, (Text(text),)))


def talk(*messages: Message, tools: Iterable[ToolSpec] = (), **settings: Any) -> Conversation:
    return Conversation(messages, tuple(tools), **settings)


def think(text: str) -> Reasoning:
    return Reasoning(text)


def answer(text: str, cuts: Sequence[int] = (), grammar: Grammar = EVERYTHING, **settings: Any) -> list[Event]:
    """All events of an answer that comes cut at these places."""
    parser = AnswerParser(grammar, Toolbox(settings.pop("tools", TOOLS)), **settings)
    events: list[Event] = []
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        events += parser.feed(text[begin:end])
    return events + parser.finish()


def meaning(events: Iterable[Event]) -> list[tuple[str, ...]]:
    """Events without how they were divided: ("text", …), ("reasoning", …), ("call", name, arguments)."""
    found: list[tuple[str, ...]] = []
    name = ""
    for event in events:
        if isinstance(event, ToolCallStart):
            name = event.name
        elif isinstance(event, ToolCallEnd):
            found.append(("call", name, event.arguments))
        elif not isinstance(event, ToolCallDelta):
            kind = "reasoning" if type(event).__name__ == "ReasoningDelta" else "text"
            if found and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1] + event.text)
            else:
                found.append((kind, event.text))
    return found


def check_integrity(events: Iterable[Event]) -> None:
    """Calls are numbered from 0, one after the other; fragments join to one JSON object, equal to the end's text."""
    begun, fragments, open_call = 0, "", False
    for event in events:
        if isinstance(event, ToolCallStart):
            assert not open_call
            assert event.index == begun
            assert event.id.startswith("call_")
            assert len(event.id) == 29
            assert event.id[5:].isalnum()
            begun, fragments, open_call = begun + 1, "", True
        elif isinstance(event, ToolCallDelta):
            assert open_call
            assert event.index == begun - 1
            fragments += event.fragment
        elif isinstance(event, ToolCallEnd):
            assert open_call
            assert event.arguments == fragments
            value = json.loads(fragments, parse_constant=lambda name: pytest_fail(name))
            assert isinstance(value, dict)
            fragments.encode()
            open_call = False
        else:
            assert event.text
    assert not open_call


def pytest_fail(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
