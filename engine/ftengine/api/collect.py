"""An answer as a whole: chunks put together in order, for responses that are not streamed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ftengine import wire
from ftengine.api.answer import Chunk, Finished, Logprobs
from ftengine.api.body import loads
from ftengine.conversation import Reasoning, ReasoningDelta, Text, TextDelta, ToolCall, ToolCallEnd, ToolCallStart

Item = Reasoning | Text | ToolCall


@dataclass
class Collected:
    """`items` in the order they came; neighbouring text or reasoning is one item."""

    items: list[Item] = field(default_factory=list)
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None
    _call: ToolCallStart | None = None

    def add(self, chunk: Chunk) -> None:
        if isinstance(chunk, TextDelta):
            self._text(Text, chunk.text)
        elif isinstance(chunk, ReasoningDelta):
            self._text(Reasoning, chunk.text)
        elif isinstance(chunk, ToolCallStart):
            self._call = chunk
        elif isinstance(chunk, ToolCallEnd):
            assert self._call is not None
            self.items.append(ToolCall(self._call.id, self._call.name, chunk.arguments))
        elif isinstance(chunk, Logprobs):
            self.logprobs.extend(chunk.tokens)
        elif isinstance(chunk, Finished):
            self.finished = chunk

    def _text(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        last = self.items[-1] if self.items else None
        if isinstance(last, kind):
            text = last.text + text
            self.items.pop()
        self.items.append(kind(text))

    @property
    def end(self) -> Finished:
        assert self.finished is not None, "the answer is not finished"
        return self.finished

    def joined(self, kind: type[Text] | type[Reasoning]) -> str:
        return "".join(item.text for item in self.items if isinstance(item, kind))

    def calls(self) -> list[ToolCall]:
        return [item for item in self.items if isinstance(item, ToolCall)]


def arguments_object(text: str | dict[str, Any]) -> dict[str, Any]:
    """A call's arguments as an object; {} for what is none."""
    value = loads(text) if isinstance(text, str) else text
    return value if isinstance(value, dict) else {}


def freeform_text(text: str | dict[str, Any]) -> str:
    """The input of a freeform tool's call: its one argument, else the text as it stands."""
    value = arguments_object(text).get("input")
    if isinstance(value, str):
        return value
    return text if isinstance(text, str) else ""
