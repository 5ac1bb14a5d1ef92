"""Anthropic Messages: an answer as its stream of events."""

from __future__ import annotations

from typing import Any

from ftengine.api import sse
from ftengine.api.answer import Chunk, Finished, Started, Usage
from ftengine.api.anthropic.message import SIGNATURE, message, message_id, stop, usage_body
from ftengine.api.envelopes import anthropic_body, problem
from ftengine.conversation import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart


class MessageStream:
    """message_start comes with the engine's first word, because it says what the cache held; pings before that."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._index = -1  # of the block that is open or was last
        self._open: str | None = None  # its type

    def opening(self) -> bytes:
        return self.heartbeat()

    def heartbeat(self) -> bytes:
        return _event("ping")

    def chunk(self, choice: int, chunk: Chunk) -> bytes:
        if isinstance(chunk, TextDelta):
            return self._delta("text", {"type": "text_delta", "text": chunk.text})
        if isinstance(chunk, ReasoningDelta):
            return self._delta("thinking", {"type": "thinking_delta", "thinking": chunk.text})
        if isinstance(chunk, ToolCallStart):
            block = {"type": "tool_use", "id": chunk.id, "name": chunk.name, "input": {}}
            return self._start("tool_use", block)
        if isinstance(chunk, ToolCallDelta):
            return self._delta("tool_use", {"type": "input_json_delta", "partial_json": chunk.fragment})
        if isinstance(chunk, ToolCallEnd):
            return self._stop()
        if isinstance(chunk, Started):
            return self._begin(chunk.usage)
        if isinstance(chunk, Finished):
            return self._stop() + _event("message_delta", delta=stop(chunk), usage=usage_body(chunk.usage))
        return b""  # log probabilities have no place in this API

    def closing(self) -> bytes:
        return _event("message_stop")

    def error(self, error: Exception) -> bytes:
        return sse.event(anthropic_body(problem(error)), "error")

    def _begin(self, usage: Usage) -> bytes:
        return _event("message_start", message=message(message_id(), self._model, usage))

    def _delta(self, kind: str, delta: dict[str, Any]) -> bytes:
        start = b""
        if self._open != kind:
            empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}
            start = self._start(kind, {"type": kind, **empty[kind]})
        return start + _event("content_block_delta", index=self._index, delta=delta)

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        before = self._stop()
        self._index += 1
        self._open = kind
        return before + _event("content_block_start", index=self._index, content_block=block)

    def _stop(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = b""
        if kind == "thinking":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", index=self._index, delta=signature)
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event({"type": kind, **fields}, kind)
