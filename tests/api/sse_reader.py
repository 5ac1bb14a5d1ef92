"""A strict reader of server-sent events, written from the WHATWG text: every line must be one it knows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Frame:
    event: str | None
    data: Any  # decoded JSON, or the string "[DONE]"


def frames(stream: Iterable[bytes]) -> Iterator[Frame | str]:
    """Frames, and comments as plain strings. Raises AssertionError for anything else, and for a cut last frame."""
    rest = b""
    for piece in stream:
        rest += piece
        while b"\n\n" in rest:
            block, rest = rest.split(b"\n\n", 1)
            yield _frame(block.decode("utf-8", "strict"))
    assert rest == b"", f"the stream ends inside a frame: {rest!r}"


def _frame(block: str) -> Frame | str:
    event: str | None = None
    data: list[str] = []
    # splitlines, not split("\n"): some clients use it, and it also cuts at U+0085, U+2028 and U+2029
    for line in block.splitlines():
        name, colon, value = line.partition(":")
        assert colon, f"not a field: {line!r}"
        value = value.removeprefix(" ")
        if name == "":
            return value
        assert name in ("event", "data"), f"unknown field {name!r}"
        if name == "event":
            event = value
        else:
            data.append(value)
    assert data, f"a frame without data: {block!r}"
    text = "\n".join(data)
    return Frame(event, text if text == "[DONE]" else json.loads(text))
