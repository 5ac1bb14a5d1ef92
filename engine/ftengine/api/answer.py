"""One answer as it grows: tokens in, text decoded and parsed, stop strings found, usage counted.

No asyncio and no HTTP here; `generate` feeds it and passes its chunks on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ftengine import wire
from ftengine.api.stops import StopScanner
from ftengine.conversation import Event, ReasoningDelta, TextDelta, ToolCallEnd, ToolCallStart
from ftengine.core import FinishReason, Reused

if TYPE_CHECKING:
    from ftengine.dialect.base import OutputParser, TokenDecoder

Reason = Literal["stop", "length", "tool_calls", "stop_string"]


@dataclass(frozen=True)
class Usage:
    """Tokens. `prompt` includes `cached` and `kept`; `output` includes `reasoning` and the end-of-sequence token.

    kept: what the cache did not have and has after this prompt. The prompt's last token is not part of it: it is
    computed each time, for what comes after it.
    """

    prompt: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Started:
    """Prefill begins: now it is known how much of the prompt was in the cache."""

    usage: Usage


@dataclass(frozen=True)
class Logprobs:
    """Of the tokens that came since the last one, in order, the end token left out."""

    tokens: tuple[wire.TokenLogprob, ...]


@dataclass(frozen=True)
class Finished:
    reason: Reason
    usage: Usage
    stop_string: str | None = None


Chunk = Event | Started | Logprobs | Finished


class PlainParser:
    """For /v1/completions: everything is text."""

    def feed(self, text: str) -> list[Event]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class Answer:
    """`feed` until `finished`."""

    def __init__(
        self,
        *,
        decoder: TokenDecoder,
        parser: OutputParser,
        prompt_tokens: int,
        stops: Sequence[str] = (),
        one_call: bool = False,
        in_reasoning: bool = False,
        keeping: bool = True,
    ) -> None:
        """`one_call`: the answer ends with its first tool call. `in_reasoning`: the prompt ends inside reasoning.
        `keeping`: the engine's prompt cache is on."""
        self._decoder = decoder
        self._parser = parser
        self._stops = StopScanner(stops)
        self._one_call = one_call
        self._in_reasoning = in_reasoning
        self._called = False
        self._started = False
        self._prompt = prompt_tokens
        self._cached = 0
        self._output = 0
        self._reasoning = 0
        self._keeping = keeping
        self._kept = 0
        self.reused: Reused | None = None  # what the engine said of the prompt, with its first Output
        self.tokens: list[int] = []  # generated, the end token too
        self.events: list[Event] = []  # given out
        self.finished: Finished | None = None

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt, self._cached, self._output, self._reasoning, self._kept)

    def feed(self, output: wire.Output) -> list[Chunk]:
        """The chunks of one Output; the last of them is Finished when the answer is over."""
        chunks: list[Chunk] = []
        if not self._started:
            self._started = True
            self._cached, self.reused = output.cached_tokens, output.reused
            if self._keeping and output.reused is not None:
                self._kept = max(self._prompt - 1 - self._cached, 0)
            chunks.append(Started(self.usage))
        self.tokens += output.tokens
        self._output += len(output.tokens)
        tokens = output.tokens[:-1] if output.finish is FinishReason.STOP else output.tokens
        events = self._parser.feed(self._decoder.feed(tokens)) if tokens else []
        if output.finish is not None:
            events += self._parser.feed(self._decoder.finish())
            events += self._parser.finish()
        if output.logprobs and tokens:
            chunks.append(Logprobs(tuple(output.logprobs[: len(tokens)])))
        self._pass_on(events, chunks)
        if self._in_reasoning:
            self._reasoning += len(tokens)
        if output.finish is not None and self.finished is None:
            self._text(self._stops.flush(), chunks)
            self._finish("length" if output.finish is FinishReason.LENGTH else "stop")
        if self.finished is not None:
            # Usage is counted at the end of the Output, whichever event ended the answer.
            self.finished = Finished(self.finished.reason, self.usage, self.finished.stop_string)
            chunks.append(self.finished)
        self.events += [chunk for chunk in chunks if not isinstance(chunk, (Started, Logprobs, Finished))]
        return chunks

    def _pass_on(self, events: Sequence[Event], chunks: list[Chunk]) -> None:
        for event in events:
            if self.finished is not None:
                return
            if isinstance(event, TextDelta):
                self._in_reasoning = False
                self._text(self._stops.feed(event.text), chunks)
                if self._stops.matched is not None:
                    self._finish("stop_string")
                continue
            self._text(self._stops.flush(), chunks)
            self._in_reasoning = isinstance(event, ReasoningDelta)
            self._called = self._called or isinstance(event, ToolCallStart)
            chunks.append(event)
            if self._one_call and isinstance(event, ToolCallEnd):
                self._finish("stop")

    @staticmethod
    def _text(text: str, chunks: list[Chunk]) -> None:
        if text:
            chunks.append(TextDelta(text))

    def _finish(self, reason: Reason) -> None:
        if reason == "stop" and self._called:
            reason = "tool_calls"
        self.finished = Finished(reason, self.usage, self._stops.matched)
