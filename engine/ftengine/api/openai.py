"""Pieces that the OpenAI APIs share: usage and log probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ftengine import wire
from ftengine.api import sse
from ftengine.api.answer import Usage


def now() -> int:
    return int(time.time())


def chat_usage(usages: Sequence[Usage], *, answers_per_prompt: int = 1) -> dict[str, Any]:
    """Of all answers to a request; a prompt counts once, however many answers it got."""
    prompt = sum(usage.prompt for usage in usages) // answers_per_prompt
    cached = sum(usage.cached for usage in usages) // answers_per_prompt
    output = sum(usage.output for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning for usage in usages)},
    }


def closing_frames(
    frame: dict[str, Any], usages: Sequence[Usage], *, answers_per_prompt: int, include_usage: bool
) -> bytes:
    """The last events of a stream: usage where it was asked for, and the end mark."""
    usage = chat_usage(usages, answers_per_prompt=answers_per_prompt)
    return (sse.event({**frame, "choices": [], "usage": usage}) if include_usage else b"") + sse.DONE


def chat_logprobs(tokens: Sequence[wire.TokenLogprob], text: Callable[[int], str]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = text(token)
        return {
            "token": piece,
            "logprob": max(logprob, wire.LEAST_LOGPROB),
            "bytes": list(piece.encode("utf-8", "replace")),
        }

    return {
        "content": [
            {**entry(token.token, token.logprob), "top_logprobs": [entry(other, value) for other, value in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }
