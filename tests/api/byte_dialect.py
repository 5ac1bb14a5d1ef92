"""A dialect for the front's tests: one token a byte, and a template and a grammar small enough to check by eye.

A turn is <role>text<end>; the answer follows "<assistant>". Its grammar: <think>...</think>, then text, in which
<call>{"name": ..., "arguments": {...}}</call> is a tool call.

With a folder it writes what it is asked into dialect.log there, as JSON lines; an answer takes it 20 ms to remember.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftengine.api.language import Language, SamplingDefaults
from ftengine.conversation import (
    Conversation,
    Event,
    Image,
    Reasoning,
    ReasoningDelta,
    Text,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolReference,
    ToolResult,
)
from ftengine.core import Boundary, BoundaryKind
from ftengine.dialect.base import OutputParser, Prompt, TokenDecoder

END = 256
TAGS = ("<think>", "</think>", "<call>", "</call>")


class ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        return self._utf8.decode(bytes(token for token in tokens if token < 256))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteParser:
    def __init__(self, tools: bool) -> None:
        self._tools = tools
        self._held = ""
        self._mode = "text"
        self._calls = 0

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while True:
            found = min(((at, tag) for tag in TAGS if (at := self._held.find(tag)) >= 0), default=None)
            if found is None:
                keep = max((n for tag in TAGS for n in range(len(tag)) if self._held.endswith(tag[:n])), default=0)
                if self._mode != "call":
                    self._emit(self._held[: len(self._held) - keep], events)
                    self._held = self._held[len(self._held) - keep :]
                return events
            at, tag = found
            self._emit(self._held[:at], events)
            self._held = self._held[at + len(tag) :]
            self._mode = {"<think>": "think", "<call>": "call"}.get(tag, "text")

    def finish(self) -> list[Event]:
        events: list[Event] = []
        self._emit(self._held, events)
        self._held = ""
        return events

    def _emit(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self._mode == "think":
            events.append(ReasoningDelta(text))
        elif self._mode == "call" and self._tools:
            call = json.loads(text)
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            index, self._calls = self._calls, self._calls + 1
            half = len(arguments) // 2
            events += [
                ToolCallStart(index, f"call_{index:024d}", call["name"]),
                ToolCallDelta(index, arguments[:half]),
                ToolCallDelta(index, arguments[half:]),
                ToolCallEnd(index, arguments),
            ]
        else:
            events.append(TextDelta(text))


class ByteDialect:
    name = "bytes"
    vocab_size = 257
    eos_token_ids = (END,)
    boundary_tokens = (ord(">"),)

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.answers: list[str] = []

    def _log(self, **fields: Any) -> None:
        if self._folder is not None:
            fields["thread"] = threading.current_thread().name
            with (self._folder / "dialect.log").open("a") as file:
                file.write(json.dumps(fields) + "\n")

    def remember(
        self, conversation: Conversation, prompt: Prompt, tokens: Sequence[int], events: Sequence[Event]
    ) -> None:
        time.sleep(0.02)
        written = ByteDecoder().feed(tokens)
        self.answers.append(written)
        self._log(event="remember", written=written, last=tokens[-1], given=[repr(event) for event in events])

    def save_answers(self, path: Path) -> None:
        path.write_text(json.dumps(self.answers))
        self._log(event="save", path=str(path))

    def load_answers(self, path: Path) -> None:
        if path.exists():
            self.answers = json.loads(path.read_text())
        self._log(event="load", answers=self.answers)

    def render(self, conversation: Conversation) -> Prompt:
        self._log(event="render", remembered=len(self.answers))
        tools = "".join(f"<tool>{tool.name}<end>" for tool in conversation.tools if not tool.deferred)
        turns = "".join(
            f"<{message.role}>{''.join(map(_part, message.parts))}<end>" for message in conversation.messages
        )
        text = f"{tools}{turns}<assistant>"
        tokens = self.encode(text)
        boundaries = [Boundary(found.end(), BoundaryKind.MESSAGE) for found in re.finditer(b"<end>", bytes(tokens))]
        return Prompt(text, tokens, boundaries=[*boundaries, Boundary(len(tokens), BoundaryKind.PROMPT_END)])

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decoder(self) -> TokenDecoder:
        return ByteDecoder()

    def parser(self, conversation: Conversation, prompt: Prompt) -> OutputParser:
        return ByteParser(bool(conversation.tools))

    def token_text(self, token: int) -> str:
        return bytes([token]).decode("latin-1") if token < 256 else "<end>"


def _part(part: Text | Image | Reasoning | ToolCall | ToolReference | ToolResult) -> str:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, Image):
        return f"[{part.label}]"
    if isinstance(part, Reasoning):
        return f"<think>{part.text}</think>"
    if isinstance(part, ToolCall):
        return f"<call>{part.name} {part.arguments}</call>"
    if isinstance(part, ToolReference):
        return f"<tool>{part.name}<end>"
    return "".join(map(_part, part.content))


def open_bytes(model_dir: str) -> Language:
    return Language(ByteDialect(Path(model_dir)), SamplingDefaults())
