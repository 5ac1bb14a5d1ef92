"""Responses: an answer as its stream of events, numbered, each item announced, filled and closed."""

from __future__ import annotations

from typing import Any, Literal

from ftengine.api import sse
from ftengine.api.answer import Chunk, Finished
from ftengine.api.envelopes import openai_error, problem
from ftengine.api.responses.output import (
    ResponseFrame,
    call_item,
    identity,
    message_item,
    reasoning_item,
    text_part,
)
from ftengine.api.responses.tools import Tools
from ftengine.conversation import ReasoningDelta, TextDelta, ToolCall, ToolCallDelta, ToolCallEnd, ToolCallStart
from ftengine.errors import RequestError

TextKind = Literal["message", "reasoning"]


class ResponseStream:
    def __init__(self, frame: ResponseFrame, tools: Tools) -> None:
        self._frame = frame
        self._tools = tools
        self._sequence = 0
        self._output: list[dict[str, Any]] = []  # items that are done
        self._item = ""  # id of the open item
        self._kind: TextKind | None = None  # of the open item, when it holds text
        self._text = ""
        self._call: ToolCallStart | None = None  # of the open item, when it is a call

    def opening(self) -> bytes:
        return self._event("response.created", response=self._frame.running()) + self.heartbeat()

    def heartbeat(self) -> bytes:
        """Codex' idle timer counts events, not comments; this one may come any number of times."""
        return self._event("response.in_progress", response=self._frame.running())

    def chunk(self, choice: int, chunk: Chunk) -> bytes:
        if isinstance(chunk, TextDelta):
            return self._delta("message", chunk.text)
        if isinstance(chunk, ReasoningDelta):
            return self._delta("reasoning", chunk.text)
        if isinstance(chunk, ToolCallStart):
            return self._call_start(chunk)
        if isinstance(chunk, ToolCallDelta):
            return self._call_delta(chunk.fragment)
        if isinstance(chunk, ToolCallEnd):
            return self._call_end(chunk.arguments)
        if isinstance(chunk, Finished):
            status = "incomplete" if chunk.reason == "length" else "completed"
            frames = self._close_text(status)
            return frames + self._event(f"response.{status}", response=self._frame.finished(self._output, chunk))
        return b""

    def closing(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        """`server_is_overloaded` would end Codex' session; any other code of the server's is tried again."""
        found = problem(error)
        code = found.code or ("invalid_prompt" if isinstance(error, RequestError) else "server_error")
        message = openai_error(found)["message"]
        return self._event("response.failed", response=self._frame.failed(self._output, code, message))

    def _delta(self, kind: TextKind, text: str) -> bytes:
        frames = b""
        if self._kind != kind:
            frames = self._close_text("completed") + self._open_text(kind)
        self._text += text
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return frames + self._event(name, **self._place(), content_index=0, delta=text, **extra)

    def _open_text(self, kind: TextKind) -> bytes:
        self._kind, self._text = kind, ""
        self._item = identity("msg" if kind == "message" else "rs")
        item = message_item(self._item, None, "in_progress") if kind == "message" else reasoning_item(self._item, None)
        return self._added(item) + self._event(
            "response.content_part.added", **self._place(), content_index=0, part=self._part("")
        )

    def _close_text(self, status: str) -> bytes:
        kind = self._kind
        if kind is None:
            return b""
        name = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        frames = self._event(name, **self._place(), content_index=0, text=self._text, **extra)
        frames += self._event(
            "response.content_part.done", **self._place(), content_index=0, part=self._part(self._text)
        )
        item = (
            message_item(self._item, self._text, status)
            if kind == "message"
            else reasoning_item(self._item, self._text)
        )
        self._kind = None
        return frames + self._done(item)

    def _part(self, text: str) -> dict[str, Any]:
        return text_part(text) if self._kind == "message" else {"type": "reasoning_text", "text": text}

    def _call_start(self, start: ToolCallStart) -> bytes:
        frames = self._close_text("completed")
        self._call = start
        self._item = identity("ctc" if self._freeform else "fc")
        return frames + self._added(
            call_item(self._item, ToolCall(start.id, start.name, ""), self._tools, "in_progress")
        )

    def _call_delta(self, fragment: str) -> bytes:
        if self._freeform:
            return b""  # the fragments are JSON around the text; the text goes out as a whole at its end
        return self._event("response.function_call_arguments.delta", **self._place(), delta=fragment)

    def _call_end(self, arguments: str) -> bytes:
        assert self._call is not None
        item = call_item(self._item, ToolCall(self._call.id, self._call.name, arguments), self._tools, "completed")
        if self._freeform:
            text = item["input"]
            frames = self._event("response.custom_tool_call_input.delta", **self._place(), delta=text)
            frames += self._event("response.custom_tool_call_input.done", **self._place(), input=text)
        else:
            frames = self._event(
                "response.function_call_arguments.done", **self._place(), name=item["name"], arguments=arguments
            )
        self._call = None
        return frames + self._done(item)

    @property
    def _freeform(self) -> bool:
        return self._call is not None and self._tools.origin(self._call.name).freeform

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": len(self._output)}

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        frames = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return frames

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse.event(event, kind)
