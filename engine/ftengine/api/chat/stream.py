"""Chat Completions: answers as a stream of chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftengine import wire
from ftengine.api import sse
from ftengine.api.answer import Chunk, Finished, Logprobs, Usage
from ftengine.api.chat.message import completion_id, finish_reason
from ftengine.api.collect import freeform_text
from ftengine.api.envelopes import openai_body, problem
from ftengine.api.openai import chat_logprobs, closing_frames, now
from ftengine.conversation import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart


class ChatStream:
    def __init__(
        self,
        model: str,
        choices: int,
        *,
        include_usage: bool,
        freeform: frozenset[str],
        token_text: Callable[[int], str],
    ) -> None:
        self._frame = {"id": completion_id(), "object": "chat.completion.chunk", "created": now(), "model": model}
        self._choices = choices
        self._include_usage = include_usage
        self._freeform = freeform
        self._token_text = token_text
        self._usages: list[Usage] = []
        self._pending: dict[int, list[wire.TokenLogprob]] = {}  # choice -> tokens whose text is still held back
        self._freeform_calls: set[tuple[int, int]] = set()  # (choice, call)

    def opening(self) -> bytes:
        return b"".join(self._delta(choice, {"role": "assistant", "content": ""}) for choice in range(self._choices))

    def heartbeat(self) -> bytes:
        return sse.KEEP_ALIVE

    def chunk(self, choice: int, chunk: Chunk) -> bytes:
        if isinstance(chunk, TextDelta):
            return self._delta(choice, {"content": chunk.text})
        if isinstance(chunk, ReasoningDelta):
            return self._delta(choice, {"reasoning_content": chunk.text})
        if isinstance(chunk, ToolCallStart):
            return self._call_start(choice, chunk)
        if isinstance(chunk, ToolCallDelta):
            if (choice, chunk.index) in self._freeform_calls:
                return b""
            return self._call(choice, {"index": chunk.index, "function": {"arguments": chunk.fragment}})
        if isinstance(chunk, ToolCallEnd):
            if (choice, chunk.index) not in self._freeform_calls:
                return b""
            return self._call(choice, {"index": chunk.index, "custom": {"input": freeform_text(chunk.arguments)}})
        if isinstance(chunk, Logprobs):
            self._pending.setdefault(choice, []).extend(chunk.tokens)
        if isinstance(chunk, Finished):
            self._usages.append(chunk.usage)
            return self._delta(choice, {}, finish_reason(chunk))
        return b""

    def closing(self) -> bytes:
        return closing_frames(
            self._frame, self._usages, answers_per_prompt=self._choices, include_usage=self._include_usage
        )

    def error(self, error: Exception) -> bytes:
        return sse.event(openai_body(problem(error)))

    def _call_start(self, choice: int, start: ToolCallStart) -> bytes:
        call: dict[str, Any] = {"index": start.index, "id": start.id}
        if start.name in self._freeform:
            self._freeform_calls.add((choice, start.index))
            return self._call(choice, {**call, "type": "custom", "custom": {"name": start.name, "input": ""}})
        return self._call(choice, {**call, "type": "function", "function": {"name": start.name, "arguments": ""}})

    def _call(self, choice: int, call: dict[str, Any]) -> bytes:
        return self._delta(choice, {"tool_calls": [call]})

    def _delta(self, choice: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        tokens = self._pending.pop(choice, None)
        logprobs = chat_logprobs(tokens, self._token_text) if tokens else None
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse.event({**self._frame, "choices": [entry]})
