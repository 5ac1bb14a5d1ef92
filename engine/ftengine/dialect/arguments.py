"""Arguments of calls in the history: always an object, whatever the client sends back."""

from __future__ import annotations

import json
from typing import Any

from ftengine.conversation import ToolSpec
from ftengine.dialect.json_stream import JsonStream

UNPARSED = "__unparsedToolInput"  # Claude Code's form of arguments that were no JSON
_DEEPEST = 200


def parse_arguments(sent: str | dict[str, Any], tool: ToolSpec | None) -> dict[str, Any]:
    """Never raises. Text that is no object stays readable for the model: repaired, else under one key."""
    if isinstance(sent, dict):
        inner = sent.get(UNPARSED)
        if len(sent) == 1 and inner is not None:
            raw = inner.get("raw") if isinstance(inner, dict) else inner
            return parse_arguments(raw if isinstance(raw, str) else json.dumps(inner, default=str), tool)
        return sent if _depth_within(sent, _DEEPEST) else {"input": "(nested too deeply to show)"}
    if not sent.strip():
        return {}
    value = _loads(sent)
    if isinstance(value, str):  # encoded twice
        inner = _loads(value)
        value = inner if isinstance(inner, dict) else value
    if isinstance(value, dict) and _depth_within(value, _DEEPEST):
        return value
    if sent.lstrip().startswith("{"):
        repaired = _loads(_repaired(sent))
        if isinstance(repaired, dict) and repaired and _depth_within(repaired, _DEEPEST):
            return repaired
    return wrap(sent, tool)


def wrap(value: Any, tool: ToolSpec | None) -> dict[str, Any]:
    """Arguments that are no object, as one: under the tool's only parameter if it has just one."""
    return {} if value is None else {_only_key(tool): value}


def _only_key(tool: ToolSpec | None) -> str:
    properties = tool.parameters.get("properties") if tool is not None and not tool.freeform else None
    if isinstance(properties, dict) and len(properties) == 1:
        return str(next(iter(properties)))
    return "input"


def _loads(text: str) -> Any:
    """None where it is no JSON. Raw newlines in strings are let pass: models write them."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _repaired(text: str) -> str:
    stream = JsonStream()
    stream.consume(text, 0, final=True)
    stream.close()
    return "".join(stream.output)


def _depth_within(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [item for outer in level for item in _items(outer)]
        if not level:
            return True
    return False


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
