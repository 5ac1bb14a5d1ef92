"""What a tool's JSON schema says about one parameter, and text to a value of that type.

XML calls carry every parameter as text; the schema decides what it is. Rules, in order: a parameter that can only be
a string is taken as it stands; otherwise the first type the schema allows and the text can be read as; otherwise the
text itself, so that the tool can say what is wrong.
"""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Iterator
from typing import Any

from ftengine.conversation import ToolSpec
from ftengine.dialect.json_stream import JsonStream
from ftengine.dialect.tools import schema

_MAX_REFERENCES = 16
_MAX_LITERAL = 1 << 20
_JSON_TYPES = ("null", "boolean", "integer", "number", "object", "array")


class ParameterTypes:
    """The parameters of one tool; `tool` None is one that the request does not have."""

    def __init__(self, tool: ToolSpec | None) -> None:
        self._root = schema(tool) if tool is not None else {}
        self._properties: dict[str, Any] = {}
        self._others: Any = None
        for part in self._alternatives(self._root):
            properties = part.get("properties")
            for name, value in properties.items() if isinstance(properties, dict) else ():
                self._properties.setdefault(name, value)
            self._others = part.get("additionalProperties", self._others)

    def names(self, parameter: str) -> bool:
        return parameter in self._properties

    @property
    def known(self) -> bool:
        return bool(self._properties)

    @property
    def required(self) -> bool:
        return bool(self._root.get("required"))

    def types(self, parameter: str) -> frozenset[str]:
        """JSON type names; empty: anything."""
        found: set[str] = set()
        for part in self._alternatives(self._properties.get(parameter, self._others)):
            found |= _own_types(part)
        return frozenset(found)

    def convert(self, parameter: str, text: str) -> Any:
        """A JSON value; never raises."""
        types = self.types(parameter)
        for part in self._alternatives(self._properties.get(parameter, self._others)):
            if text in _choices(part):
                return text
        allowed = [name for name in _JSON_TYPES if name in types] if types else list(_JSON_TYPES)
        for name in allowed:
            found, value = _read_as(name, text.strip())
            if found:
                return value
        if "string" not in types and types:  # written as another type than asked for, still a value
            for name in ("number", "boolean", "object", "array"):
                found, value = _read_as(name, text.strip())
                if found:
                    return value
            return _repaired(text.strip())
        return text

    def _alternatives(self, part: Any) -> Iterator[dict[str, Any]]:
        """The schema itself and what it is composed of."""
        todo = [part]
        for _ in range(_MAX_REFERENCES * 4):
            if not todo:
                return
            part = self._resolved(todo.pop(0))
            if isinstance(part, dict):
                yield part
                for key in ("anyOf", "oneOf", "allOf"):
                    members = part.get(key)
                    todo += members if isinstance(members, list) else []

    def _resolved(self, part: Any) -> Any:
        for _ in range(_MAX_REFERENCES):
            reference = part.get("$ref") if isinstance(part, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return part
            part = self._root
            for step in reference[2:].split("/"):
                part = part.get(step) if isinstance(part, dict) else None
        return None


def _own_types(part: dict[str, Any]) -> set[str]:
    declared = part.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types = {name for name in declared if isinstance(name, str)}
    if not types:
        types = {_type_of(value) for value in _choices(part)}
    if not types and isinstance(part.get("properties"), dict):
        types = {"object"}
    if part.get("nullable") is True and types:
        types.add("null")
    return types


def _choices(part: dict[str, Any]) -> list[Any]:
    values = part.get("enum")
    return values if isinstance(values, list) else [part["const"]] if "const" in part else []


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "array"


def _read_as(name: str, text: str) -> tuple[bool, Any]:
    """(whether the text is of that JSON type, its value)"""
    if name == "null":
        return text.lower() in ("null", "none"), None
    if name == "boolean":
        return text.lower() in ("true", "false"), text.lower() == "true"
    value = _loads(text)
    if name in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False, None
        whole = isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53
        if name == "integer":
            return isinstance(value, int) or whole, int(value)
        return True, value
    kind = dict if name == "object" else list
    if not isinstance(value, kind):
        value = _python_literal(text)
    return isinstance(value, kind), value


def _loads(text: str) -> Any:
    try:
        value = json.loads(text, strict=False, parse_constant=_no_constant)
        json.dumps(value, allow_nan=False)  # 1e999 reads as infinity
    except (ValueError, RecursionError):
        return None
    return value


def _repaired(text: str) -> Any:
    """An object or array that is cut off or badly quoted; other text as it is."""
    if not text.startswith(("{", "[")):
        return text
    stream = JsonStream()
    stream.consume(text, 0, final=True)
    stream.close()
    return json.loads("".join(stream.output))


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _python_literal(text: str) -> Any:
    """Models trained on Python write {'a': True}."""
    if len(text) > _MAX_LITERAL or not text.startswith(("{", "[")):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\\d"
            value = ast.literal_eval(text)
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
