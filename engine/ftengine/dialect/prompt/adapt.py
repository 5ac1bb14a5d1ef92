"""Turns for a template that cannot render all of them: what it lacks becomes text where it can."""

from __future__ import annotations

import json
from typing import Any

from ftengine.dialect.control import ControlTokens
from ftengine.dialect.prompt.capabilities import Capabilities
from ftengine.dialect.prompt.turns import Call, Turn


def adapt(turns: list[Turn], capabilities: Capabilities) -> list[Turn]:
    if not capabilities.tool_turns:
        turns = [_tool_turn_as_text(turn) for turn in turns]
    elif not capabilities.parallel_calls:
        turns = _one_call_a_turn(turns)
    if not capabilities.system and turns and turns[0].role == "system":
        turns = [Turn("user", turns[0].text), *turns[1:]]
        turns = _merged_at(turns, 1)
    if not capabilities.repeated_users:
        for position in range(len(turns) - 1, 0, -1):
            turns = _merged_at(turns, position)
    return turns


def with_user(turns: list[Turn]) -> list[Turn]:
    """Some templates refuse a conversation in which nobody asks anything."""
    start = 1 if turns and turns[0].role == "system" else 0
    return [*turns[:start], Turn("user", "Go on."), *turns[start:]]


def as_messages(turns: list[Turn], capabilities: Capabilities, control: ControlTokens) -> list[dict[str, Any]]:
    """In the form that templates read, all that is content guarded."""
    return [_message(turn, capabilities, control) for turn in turns]


def _message(turn: Turn, capabilities: Capabilities, control: ControlTokens) -> dict[str, Any]:
    text, reasoning, guard = turn.text, turn.reasoning, control.guard_text
    if text and reasoning and turn.calls and not capabilities.text_beside_reasoning:
        text, reasoning = "", f"{reasoning}\n\n{text}"
    message: dict[str, Any] = {"role": turn.role, "content": guard(text)}
    if reasoning:
        message[capabilities.reasoning_key] = guard(reasoning)
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": guard(call.id),
                "type": "function",
                "function": {"name": guard(call.name), "arguments": control.guard(call.arguments)},
            }
            for call in turn.calls
        ]
    if turn.answers is not None:
        message["tool_call_id"] = guard(turn.answers.id)
        message["name"] = guard(turn.answers.name)
    return message


def _tool_turn_as_text(turn: Turn) -> Turn:
    if turn.role == "tool":
        name = turn.answers.name if turn.answers else "a tool"
        return Turn("user", f"Result of {name}:\n{turn.text}")
    if turn.calls:
        lines = [turn.text] if turn.text else []
        return Turn(turn.role, "\n".join(lines + [_called(call) for call in turn.calls]), turn.reasoning)
    return turn


def _called(call: Call) -> str:
    return f"Call of {call.name}: {json.dumps(call.arguments, ensure_ascii=False)}"


def _one_call_a_turn(turns: list[Turn]) -> list[Turn]:
    """Calls made together, one after the other, each before its own result."""
    split: list[Turn] = []
    results = {id(turn.answers): turn for turn in turns if turn.answers is not None}
    for turn in turns:
        if len(turn.calls) > 1:
            for position, call in enumerate(turn.calls):
                first = position == 0
                split.append(Turn("assistant", turn.text if first else "", turn.reasoning if first else "", [call]))
                split += [results.pop(id(call))] if id(call) in results else []
        elif turn.answers is None or id(turn.answers) in results:
            split.append(turn)
    return split


def _merged_at(turns: list[Turn], position: int) -> list[Turn]:
    """The turn at `position` joined to the one before it, if both are the user's or both the assistant's text."""
    if not 0 < position < len(turns):
        return turns
    first, second = turns[position - 1], turns[position]
    if first.role != second.role or first.role not in ("user", "assistant") or first.calls or second.calls:
        return turns
    reasoning = "\n\n".join(filter(None, (first.reasoning, second.reasoning)))
    joined = Turn(first.role, "\n\n".join(filter(None, (first.text, second.text))), reasoning)
    return [*turns[: position - 1], joined, *turns[position + 1 :]]
