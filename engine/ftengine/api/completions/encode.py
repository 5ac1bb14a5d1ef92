"""Completions: answers as one JSON body or as a stream of chunks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from ftengine import wire
from ftengine.api import sse
from ftengine.api.answer import Chunk, Finished, Logprobs, Usage
from ftengine.api.collect import Collected
from ftengine.api.envelopes import openai_body, problem
from ftengine.api.openai import chat_usage, closing_frames, now
from ftengine.conversation import Text, TextDelta


def frame(model: str) -> dict[str, Any]:
    return {"id": "cmpl-" + secrets.token_hex(12), "object": "text_completion", "created": now(), "model": model}


def logprobs_body(tokens: Sequence[wire.TokenLogprob], text: Callable[[int], str], offset: int) -> dict[str, Any]:
    """The older form: parallel lists. `offset` is the first token's place in the answer's text."""
    pieces = [text(token.token) for token in tokens]
    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": pieces,
        "token_logprobs": [max(token.logprob, wire.LEAST_LOGPROB) for token in tokens],
        "top_logprobs": [
            {text(other): max(value, wire.LEAST_LOGPROB) for other, value in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }


def whole(
    answers: list[Collected],
    model: str,
    echoes: Sequence[str],
    *,
    answers_per_prompt: int,
    token_text: Callable[[int], str],
    logprobs: bool,
) -> dict[str, Any]:
    """`echoes`: for each answer the text to repeat before it."""
    choices = []
    for index, (answer, echo) in enumerate(zip(answers, echoes, strict=True)):
        choices.append(
            {
                "index": index,
                "text": echo + answer.joined(Text),
                "logprobs": logprobs_body(answer.logprobs, token_text, len(echo)) if logprobs else None,
                "finish_reason": _finish_reason(answer.end),
            }
        )
    usage = chat_usage([answer.end.usage for answer in answers], answers_per_prompt=answers_per_prompt)
    return {**frame(model), "choices": choices, "usage": usage}


class CompletionStream:
    def __init__(
        self,
        model: str,
        echoes: Sequence[str],
        *,
        answers_per_prompt: int,
        include_usage: bool,
        token_text: Callable[[int], str],
    ) -> None:
        self._frame = frame(model)
        self._echoes = echoes
        self._answers_per_prompt = answers_per_prompt
        self._include_usage = include_usage
        self._token_text = token_text
        self._usages: list[Usage] = []
        self._pending: dict[int, list[wire.TokenLogprob]] = {}
        self._offsets = {choice: len(echo) for choice, echo in enumerate(echoes)}

    def opening(self) -> bytes:
        return b"".join(self._text(choice, echo) for choice, echo in enumerate(self._echoes) if echo)

    def heartbeat(self) -> bytes:
        return sse.KEEP_ALIVE

    def chunk(self, choice: int, chunk: Chunk) -> bytes:
        if isinstance(chunk, TextDelta):
            return self._text(choice, chunk.text)
        if isinstance(chunk, Logprobs):
            self._pending.setdefault(choice, []).extend(chunk.tokens)
        if isinstance(chunk, Finished):
            self._usages.append(chunk.usage)
            return self._text(choice, "", _finish_reason(chunk))
        return b""

    def closing(self) -> bytes:
        return closing_frames(
            self._frame, self._usages, answers_per_prompt=self._answers_per_prompt, include_usage=self._include_usage
        )

    def error(self, error: Exception) -> bytes:
        return sse.event(openai_body(problem(error)))

    def _text(self, choice: int, text: str, finish: str | None = None) -> bytes:
        tokens, logprobs = self._pending.pop(choice, None), None
        if tokens:
            logprobs = logprobs_body(tokens, self._token_text, self._offsets[choice])
            self._offsets[choice] += sum(len(piece) for piece in logprobs["tokens"])
        entry = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return sse.event({**self._frame, "choices": [entry]})


def _finish_reason(finished: Finished) -> str:
    return "length" if finished.reason == "length" else "stop"
