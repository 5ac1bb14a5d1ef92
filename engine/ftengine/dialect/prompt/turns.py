"""A conversation as turns that chat templates accept, in an order that keeps every call beside its results.

Turns depend only on what stands before them wherever that is possible, so an agent's next request, which appends,
renders to the same text and a continuation of it.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ftengine.conversation import Conversation, Message, Reasoning, Text, ToolCall, ToolResult
from ftengine.dialect.arguments import parse_arguments
from ftengine.dialect.prompt.parts import render_parts
from ftengine.dialect.tools import Toolbox

NO_RESULT = "(no result: the call did not finish)"
SILENT_FAILURE = "The tool failed and said nothing."
_REMINDER, _REMINDER_END = "<system-reminder>", "</system-reminder>"
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_THINKING = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_NOT_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z]+")


@dataclass
class Call:
    """A call the assistant made, its arguments an object whatever the client sent."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass
class Turn:
    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    answers: Call | None = None  # of a tool turn


@dataclass
class _Result:
    call_id: str
    text: str


@dataclass
class _Block:
    """A system or developer text that is not at the beginning."""

    text: str


_Item = Turn | _Result | _Block


def order_turns(conversation: Conversation, toolbox: Toolbox) -> list[Turn]:
    """System turn (if any), then user, assistant and tool turns; nothing empty, calls and results side by side."""
    leading, items = _flatten(conversation.messages, toolbox)
    turns = [Turn("system", "\n\n".join(leading))] if leading else []
    group: list[_Item] = []
    for item in items:
        if isinstance(item, Turn) and item.role == "assistant":
            turns += _settle(group, more_follows=True)
            group = []
        group.append(item)
    return turns + _settle(group, more_follows=False)


def _flatten(messages: Iterable[Message], toolbox: Toolbox) -> tuple[list[str], list[_Item]]:
    leading: list[str] = []
    items: list[_Item] = []
    for message in messages:
        if message.role in ("system", "developer"):
            text = _system_text(message, toolbox)
            if text and not items:
                leading.append(text)
            elif text:
                items.append(_Block(text))
        elif message.role == "assistant":
            _append_assistant(items, message, toolbox)
        else:
            items += _results_and_text(message, toolbox)
    return leading, items


def _system_text(message: Message, toolbox: Toolbox) -> str:
    """Without the line in which Claude Code sends its version, which changes and tells the model nothing."""
    parts = [Text(_BILLING_LINE.sub("", part.text)) if isinstance(part, Text) else part for part in message.parts]
    return render_parts(parts, toolbox)


def _append_assistant(items: list[_Item], message: Message, toolbox: Toolbox) -> None:
    text = render_parts(message.parts, toolbox)
    reasoning = "\n\n".join(part.text for part in message.parts if isinstance(part, Reasoning) and part.text.strip())
    calls = [
        Call(part.id, part.name, parse_arguments(part.arguments, toolbox.find(part.name)))
        for part in message.parts
        if isinstance(part, ToolCall)
    ]
    inline = None if reasoning else _THINKING.match(text)
    if inline:  # a client that knows no reasoning sends back what it was shown
        reasoning, text = inline[1].strip(), text[inline.end() :]
    text = text if text.strip() else ""
    last = items[-1] if items else None
    if isinstance(last, Turn) and last.role == "assistant":
        last.text = _joined(last.text, text)
        last.reasoning = _joined(last.reasoning, reasoning)
        last.calls += calls
    elif text or reasoning or calls:
        items.append(Turn("assistant", text, reasoning, calls))


def _results_and_text(message: Message, toolbox: Toolbox) -> list[_Item]:
    results: list[_Item] = []
    rest = []
    for part in message.parts:
        if isinstance(part, ToolResult):
            text = render_parts(part.content, toolbox)
            results.append(_Result(part.call_id, text or (SILENT_FAILURE if part.is_error else "")))
        else:
            rest.append(part)
    text = render_parts(rest, toolbox)
    if not text.strip():
        return results
    if message.role == "tool" and not results:
        return [_Result("", text)]
    return [*results, Turn("user", text)]


def _settle(group: list[_Item], more_follows: bool) -> list[Turn]:
    """One assistant turn (or none) and all that follows it: results in the order of the calls, then the rest."""
    assistant = group[0] if group and isinstance(group[0], Turn) and group[0].role == "assistant" else None
    rest = group[1:] if assistant else group
    calls = assistant.calls if assistant else []
    found = _match(calls, [item for item in rest if isinstance(item, _Result)])
    turns = [assistant] if assistant else []
    if found or more_follows or any(not isinstance(item, _Result) for item in rest):
        for position, call in enumerate(calls):
            result = found.get(position)
            turns.append(Turn("tool", result.text if result else NO_RESULT, answers=call))
    matched = {id(result) for result in found.values()}
    for item in rest:
        if isinstance(item, Turn) and turns and turns[-1].role == "tool" and _only_reminders(item.text):
            turns[-1].text = _joined(turns[-1].text, item.text)
        elif isinstance(item, Turn):
            turns.append(item)
        elif isinstance(item, _Result) and id(item) not in matched:
            turns.append(Turn("user", f"Result of a tool call that is not part of this conversation:\n{item.text}"))
        elif isinstance(item, _Block):
            _append_block(turns, item)
    return turns


def _only_reminders(text: str) -> bool:
    """What Claude Code says beside results. As the user's turn it would be a question, and templates that show earlier
    rounds without reasoning would then change all that went before."""
    rest = text.strip()
    if not rest:
        return False
    while rest:
        end = rest.find(_REMINDER_END)
        if not rest.startswith(_REMINDER) or end < 0:
            return False
        rest = rest[end + len(_REMINDER_END) :].lstrip()
    return True


def _match(calls: list[Call], results: list[_Result]) -> dict[int, _Result]:
    """Call position to its result: by id, clients having dropped some characters of it; without id by order."""
    by_id: defaultdict[str, deque[int]] = defaultdict(deque)
    for position, call in enumerate(calls):
        by_id[bare(call.id)].append(position)
    in_order = deque(range(len(calls)))
    found: dict[int, _Result] = {}
    for result in results:
        wanted = bare(result.call_id)
        candidates = by_id[wanted] if wanted else in_order
        while candidates and candidates[0] in found:
            candidates.popleft()
        if candidates:
            found[candidates.popleft()] = result
    return found


def bare(call_id: str) -> str:
    """What all clients leave of an id."""
    return call_id if call_id.isascii() and call_id.isalnum() else _NOT_ALPHANUMERIC.sub("", call_id)


def _append_block(turns: list[Turn], block: _Block) -> None:
    text = f"<system_message>\n{block.text}\n</system_message>"
    if turns and turns[-1].role == "user":
        turns[-1].text = _joined(turns[-1].text, text)
    else:
        turns.append(Turn("user", text))


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second
