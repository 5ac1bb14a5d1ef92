"""The tools of a conversation: as a template lists them, and as the output grammar looks them up."""

from __future__ import annotations

import json
import marshal
from collections.abc import Iterable
from typing import Any

from ftengine.conversation import ToolSpec
from ftengine.dialect.control import ControlTokens

_LISTS = 16  # kept, of tools

FREEFORM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's input as plain text."}},
    "required": ["input"],
}


class Toolbox:
    """Tools by name, deferred ones included. Of two with one name the first counts."""

    def __init__(self, tools: Iterable[ToolSpec]) -> None:
        self._tools: dict[str, ToolSpec] = {}
        for tool in tools:
            self._tools.setdefault(tool.name, tool)

    def __bool__(self) -> bool:
        return bool(self._tools)

    def find(self, name: str) -> ToolSpec | None:
        return self._tools.get(name)

    def listed(self) -> list[dict[str, Any]]:
        """What stands at the top of the prompt. Deferred tools are left out: the prefix stays as they come in."""
        return [definition(tool) for tool in self._tools.values() if not tool.deferred]

    def introduce(self, name: str) -> str:
        """The text that makes a deferred tool known where a tool result refers to it."""
        tool = self._tools.get(name)
        if tool is None:
            return f"The tool {name} is not available."
        if not tool.deferred:
            return f"The tool {name} is available; it is defined above."
        text = json.dumps(definition(tool), ensure_ascii=False)
        return f"The tool {name} is available from now on and is called like the others:\n{text}"


class GuardedTools:
    """Lists of tools with their control tokens guarded: an agent sends the same one with every request."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._last: dict[bytes, list[dict[str, Any]]] = {}

    def guarded(self, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The result is shared: not to be changed."""
        try:
            key = marshal.dumps(listed, 2)  # equal only for equal values of equal types
        except ValueError:  # nested too deeply for it
            return list(self._control.guard(listed))
        found = self._last.get(key)
        if found is None:
            found = list(self._control.guard(listed))
            self._last = {**dict(list(self._last.items())[1 - _LISTS :]), key: found}
        return found


def definition(tool: ToolSpec) -> dict[str, Any]:
    """In OpenAI's form, which chat templates expect."""
    function = {"name": tool.name, "description": tool.description, "parameters": schema(tool)}
    return {"type": "function", "function": function}


def schema(tool: ToolSpec) -> dict[str, Any]:
    """JSON schema of the arguments object."""
    if tool.freeform:
        return FREEFORM_SCHEMA
    return tool.parameters if tool.parameters else {"type": "object", "properties": {}}
