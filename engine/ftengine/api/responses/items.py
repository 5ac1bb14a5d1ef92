"""Responses: input items to neutral messages.

What one assistant turn produced (reasoning, text, calls) lies in several items and becomes one message again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ftengine.api.body import check_depth
from ftengine.api.responses.tools import Tools, flat_name
from ftengine.api.settings import Limits
from ftengine.api.translate import Notes, block_type, placeholder, text_field
from ftengine.conversation import Image, Message, Part, Reasoning, Role, Text, ToolCall, ToolReference, ToolResult
from ftengine.errors import BadRequest

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}


class Items:
    """`add` each input item; `messages` when done. Tools that items bring go to `tools`."""

    def __init__(self, tools: Tools, limits: Limits, notes: Notes) -> None:
        self._tools = tools
        self._limits = limits
        self._notes = notes
        self._messages: list[Message] = []
        self._turn: list[Part] = []  # of the assistant's turn that is being put together

    def messages(self) -> tuple[Message, ...]:
        self._end_turn()
        return tuple(self._messages)

    def add(self, item: Any, where: str) -> None:
        """Raises BadRequest."""
        if not isinstance(item, dict):
            raise BadRequest(f"{where}: expected an object", param=where)
        kind = "message" if item.get("type") is None and "role" in item else block_type(item, where)
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            self._turn.append(self._call(kind, item, where))
        elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
            result = ToolResult(text_field(item, "call_id", where), self._output(item.get("output"), f"{where}.output"))
            self._put("tool", (result,))
        elif kind == "additional_tools":
            self._tools.add(_array(item.get("tools"), f"{where}.tools"), f"{where}.tools")
        elif kind == "tool_search_call":
            given = item.get("arguments")
            check_depth(given, f"{where}.arguments", self._limits)
            arguments = given if isinstance(given, (str, dict)) else {}
            self._turn.append(ToolCall(_identity(item), "tool_search", arguments))
        elif kind == "tool_search_output":
            names = self._tools.add(_array(item.get("tools"), f"{where}.tools"), f"{where}.tools", deferred=True)
            self._put("tool", (ToolResult(_identity(item), tuple(map(ToolReference, names))),))
        else:
            self._notes.add(f"an input item of type {kind[:40]} was left out")

    def _put(self, role: Role, parts: tuple[Part, ...]) -> None:
        self._end_turn()
        self._messages.append(Message(role, parts))

    def _end_turn(self) -> None:
        if self._turn:
            self._messages.append(Message("assistant", tuple(self._turn)))
            self._turn = []

    def _message(self, item: dict[str, Any], where: str) -> None:
        name = text_field(item, "role", where)
        role = _ROLES.get(name)
        if role is None:
            raise BadRequest(f"{where}.role: expected one of {', '.join(_ROLES)}", param=f"{where}.role")
        content = self._content(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._turn += content
        else:
            self._put(role, content)

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        """The text if the client kept it, else its summary. Encrypted reasoning is not ours and says nothing here."""
        for field in ("content", "summary"):
            blocks = item.get(field)
            parts = self._content(blocks, f"{where}.{field}") if blocks else ()
            text = "".join(part.text for part in parts if isinstance(part, Text))
            if text:
                self._turn.append(Reasoning(text))
                return

    def _call(self, kind: str, item: dict[str, Any], where: str) -> ToolCall:
        call_id = _identity(item)
        if kind == "local_shell_call":
            action = item.get("action")
            check_depth(action, f"{where}.action", self._limits)
            return ToolCall(call_id, "local_shell", action if isinstance(action, dict) else {})
        space = item.get("namespace")
        name = flat_name(text_field(item, "name", where), space if isinstance(space, str) else None)
        if kind == "custom_tool_call":
            return ToolCall(call_id, name, {"input": text_field(item, "input", where)})
        arguments = item.get("arguments", "{}")
        if not isinstance(arguments, (str, dict)):
            raise BadRequest(f"{where}.arguments: expected a string", param=f"{where}.arguments")
        check_depth(arguments, f"{where}.arguments", self._limits)
        return ToolCall(call_id, name, arguments)

    def _output(self, output: Any, where: str) -> tuple[Text | Image, ...]:
        if isinstance(output, dict):  # not in the documentation; some clients send their tool's own object
            check_depth(output, where, self._limits)
            return (Text(msgspec.json.encode(output).decode()),)
        return self._content(output, where)

    def _content(self, content: Any, where: str) -> tuple[Text | Image, ...]:
        if content is None or isinstance(content, str):
            return (Text(content),) if content else ()
        blocks = enumerate(_array(content, where))
        return tuple(self._block(block, f"{where}[{index}]") for index, block in blocks)

    def _block(self, block: Any, where: str) -> Text | Image:
        kind = block_type(block, where)
        if kind in _TEXTS:
            return Text(text_field(block, "text", where))
        if kind == "refusal":
            return Text(text_field(block, "refusal", where))
        return placeholder(kind.removeprefix("input_"), self._notes)


def _array(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{where}: expected an array", param=where)
    return value


def _identity(item: dict[str, Any]) -> str:
    for field in ("call_id", "id"):
        value = item.get(field)
        if isinstance(value, str):
            return value
    return ""
