"""Refuse a prompt that is far too long without tokenizing all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ftengine.conversation import Conversation, Reasoning, Text, ToolCall, ToolResult
from ftengine.errors import PromptTooLong

if TYPE_CHECKING:
    from ftengine.dialect.base import Dialect

SURE_CHARACTERS = 6  # a token, on average: under that many for each token of the context, simply render
CHEAP_CHARACTERS = 1 << 20  # are tokenized in well under a second: then the count may be exact
PIECE = 32_768  # characters tokenized at a time


def check_size(source: Conversation | str, dialect: Dialect, context: int) -> None:
    """Raises PromptTooLong, with an estimate of the whole, as soon as the tokens counted exceed `context`.

    Cutting text in pieces makes more tokens, never fewer; a piece is allowed 16 for its two ends, so that no
    prompt is refused here that would have fitted.
    """
    total = sum(map(len, _texts(source)))
    if total <= max(SURE_CHARACTERS * context, CHEAP_CHARACTERS):
        return
    counted = seen = 0
    for text in _texts(source):
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            seen += len(piece)
            counted += max(len(dialect.encode(piece)) - 16, 0)
            if counted > context:
                raise PromptTooLong(counted * total // seen, context)


def _texts(source: Conversation | str) -> Iterator[str]:
    if isinstance(source, str):
        yield source
        return
    for tool in source.tools:
        if not tool.deferred:
            yield tool.description
            yield msgspec.json.encode(tool.parameters).decode()
    for message in source.messages:
        for part in message.parts:
            if isinstance(part, (Text, Reasoning)):
                yield part.text
            elif isinstance(part, ToolCall):
                if isinstance(part.arguments, str):
                    yield part.arguments
            elif isinstance(part, ToolResult):
                for inner in part.content:
                    if isinstance(inner, Text):
                        yield inner.text
