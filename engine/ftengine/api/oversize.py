"""Refuse a prompt that is far too long without tokenizing all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ftengine.conversation import Conversation, Image, Part, Reasoning, Text, ToolCall, ToolReference, ToolResult
from ftengine.errors import PromptTooLong

if TYPE_CHECKING:
    from ftengine.dialect.base import Dialect

SURE_CHARACTERS = 6  # a token, on average: under that many for each token of the context, simply render
CHEAP_CHARACTERS = 1 << 20  # are tokenized in well under a second: then the count may be exact
PIECE = 32_768  # characters tokenized at a time


def check_size(source: Conversation | str, dialect: Dialect, context: int) -> None:
    """Raises PromptTooLong, with an estimate of the whole, as soon as the tokens counted exceed `context`.

    Cutting text in pieces and joining short ones makes more tokens, seldom fewer; a piece is allowed 16 for its two
    ends and 2 for each joint, so that no prompt is refused here that would have fitted.
    """
    total = sum(map(len, _texts(source)))
    if total <= max(SURE_CHARACTERS * context, CHEAP_CHARACTERS):
        return
    counted = seen = 0
    for texts in _pieces(_texts(source)):
        seen += sum(map(len, texts))
        counted += max(len(dialect.encode("\n".join(texts))) - 16 - 2 * (len(texts) - 1), 0)
        if counted > context:
            raise PromptTooLong(counted * total // seen, context)


def _pieces(texts: Iterable[str]) -> Iterator[list[str]]:
    """Long texts cut and short ones gathered, each piece of less than two PIECE characters."""
    gathered: list[str] = []
    size = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            gathered.append(text[start : start + PIECE])
            size += len(gathered[-1])
            if size >= PIECE:
                yield gathered
                gathered, size = [], 0
    if gathered:
        yield gathered


def _texts(source: Conversation | str) -> Iterator[str]:
    """All that a rendering writes out, a deferred tool once for each reference to it."""
    if isinstance(source, str):
        yield source
        return
    deferred: dict[str, str] = {}
    for tool in source.tools:
        text = f"{tool.description}{_written(tool.parameters)}"
        if tool.deferred:
            deferred.setdefault(tool.name, text)
        else:
            yield text
    for message in source.messages:
        for part in message.parts:
            if isinstance(part, ToolResult):
                yield from (_text(inner, deferred) for inner in part.content)
            else:
                yield _text(part, deferred)


def _text(part: Part | ToolReference, deferred: Mapping[str, str]) -> str:
    if isinstance(part, (Text, Reasoning)):
        return part.text
    if isinstance(part, ToolCall):
        return part.arguments if isinstance(part.arguments, str) else _written(part.arguments)
    if isinstance(part, ToolReference):
        return deferred.get(part.name, "")
    if isinstance(part, Image):
        from ftengine.dialect.prompt.parts import placeholder

        return placeholder(part)
    return ""


def _written(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
