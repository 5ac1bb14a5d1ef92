"""What the translations of all APIs share. Things that are accepted but not honoured leave a note for the log."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ftengine.api.body import check_depth
from ftengine.api.settings import Limits
from ftengine.conversation import Image
from ftengine.errors import BadRequest


class Notes:
    """Counted, so that a request with a hundred images leaves one line."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, text: str) -> None:
        self._counts[text] += 1

    def lines(self) -> list[str]:
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._counts.items()]


def placeholder(kind: str, notes: Notes) -> Image:
    """For content that the model cannot see."""
    kind = kind[:40] or "content"
    notes.add(f"content of type {kind!r} became a placeholder")
    return Image(kind)


def block_type(block: Any, where: str) -> str:
    """Raises BadRequest for a content block that is no object or has no type."""
    if not isinstance(block, dict):
        raise BadRequest(f"{where}: expected an object", param=where)
    kind = block.get("type")
    if not isinstance(kind, str):
        raise BadRequest(f"{where}.type: expected a string", param=f"{where}.type")
    return kind


def text_field(block: dict[str, Any], name: str, where: str) -> str:
    """Raises BadRequest when the field is missing or no string."""
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name}: expected a string", param=f"{where}.{name}")
    return value


def schema_field(value: Any, where: str, limits: Limits) -> dict[str, Any]:
    """A tool's parameters; absent means none. Raises BadRequest."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: expected an object", param=where)
    check_depth(value, where, limits)
    return value


def tool_name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or len(value) > 256:
        raise BadRequest(f"{where}: expected a name of 1 to 256 characters", param=where)
    return value
