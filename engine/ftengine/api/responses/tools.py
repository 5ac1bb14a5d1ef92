"""Responses: the tools of a request, flattened for the model and found again when it calls one.

Codex groups tools in namespaces and may bring more of them as input items; a call must come back under the name
and namespace that the client knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftengine.api.settings import Limits
from ftengine.api.translate import Notes, block_type, schema_field, tool_name
from ftengine.conversation import ToolSpec
from ftengine.errors import BadRequest, TooLarge

GRAMMAR_CHARACTERS = 8_192  # of a freeform tool's grammar that are shown to the model


@dataclass(frozen=True)
class Origin:
    """How the client knows a tool."""

    name: str
    namespace: str | None = None
    freeform: bool = False


class Tools:
    """Filled by `add`, in the order of the request; of two tools with one name the first stays."""

    def __init__(self, limits: Limits, notes: Notes) -> None:
        self._limits = limits
        self._notes = notes
        self._specs: dict[str, ToolSpec] = {}
        self._origins: dict[str, Origin] = {}

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(self._specs.values())

    def origin(self, flat: str) -> Origin:
        return self._origins.get(flat, Origin(flat))

    def add(self, tools: list[Any], where: str, *, namespace: str | None = None, deferred: bool = False) -> list[str]:
        """Returns the flat names. Raises BadRequest, or TooLarge at the limit of tools."""
        names: list[str] = []
        for index, tool in enumerate(tools):
            place = f"{where}[{index}]"
            kind = block_type(tool, place)
            if kind == "namespace":
                inner = tool.get("tools")
                if not isinstance(inner, list):
                    raise BadRequest(f"{place}.tools: expected an array", param=f"{place}.tools")
                group = tool_name(tool.get("name"), f"{place}.name")
                names += self.add(inner, f"{place}.tools", namespace=group, deferred=deferred)
            elif kind in ("function", "custom"):
                names.append(self._add_one(tool, place, namespace, kind == "custom", deferred))
            else:
                self._notes.add(f"the tool type {kind[:40]} is not served and was left out")
        return names

    def _add_one(self, tool: dict[str, Any], where: str, namespace: str | None, freeform: bool, deferred: bool) -> str:
        name = tool_name(tool.get("name"), f"{where}.name")
        flat = flat_name(name, namespace)
        if flat in self._specs:
            return flat
        if len(self._specs) >= self._limits.tools:
            raise TooLarge(f"{where}: more than {self._limits.tools} tools", param=where)
        description = tool.get("description")
        text = description if isinstance(description, str) else ""
        self._origins[flat] = Origin(name, namespace, freeform)
        self._specs[flat] = ToolSpec(
            name=flat,
            description=text + _grammar(tool) if freeform else text,
            parameters=schema_field(tool.get("parameters"), f"{where}.parameters", self._limits),
            freeform=freeform,
            deferred=deferred or tool.get("defer_loading") is True,
        )
        return flat


def flat_name(name: str, namespace: str | None) -> str:
    """One name for the model: `group__tool`."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _grammar(tool: dict[str, Any]) -> str:
    """A freeform tool's grammar is not enforced here; shown to the model, it is a description of what to write."""
    form = tool.get("format")
    definition = form.get("definition") if isinstance(form, dict) else None
    if not isinstance(definition, str) or not definition or len(definition) > GRAMMAR_CHARACTERS:
        return ""
    return f"\n\nThe input follows this grammar:\n{definition}"
