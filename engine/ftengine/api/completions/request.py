"""Completions: the JSON of a request. A prompt is text or token ids, one or several."""

from __future__ import annotations

from typing import Any

from ftengine.api.chat.request import StreamOptions
from ftengine.api.sampling import Count, SamplingFields, TopCount
from ftengine.api.settings import Limits
from ftengine.errors import BadRequest

DEFAULT_TOKENS = 16  # this API's own


class CompletionRequest(SamplingFields, kw_only=True, frozen=True):
    prompt: str | list[Any] | None = None
    model: str | None = None
    max_tokens: Count | None = None
    n: Count | None = None
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: TopCount | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    prompt_cache_key: Any = None  # read by sessions.openai_caller, of any type, as is the next
    user: Any = None


def prompts(body: CompletionRequest, limits: Limits) -> list[str | list[int]]:
    """Raises BadRequest."""
    if body.suffix:
        raise BadRequest("suffix: filling in the middle is not supported", param="suffix")
    if (body.best_of or 1) > (body.n or 1):
        raise BadRequest("best_of: must not be more than n", param="best_of")
    given = body.prompt
    if not given:
        raise BadRequest("prompt: required, and not empty", param="prompt")
    if isinstance(given, str):
        return [given]
    if _is_ids(given):
        return [given]
    if len(given) > limits.choices:
        raise BadRequest(f"prompt: {len(given)} given, the limit is {limits.choices}", param="prompt")
    for index, entry in enumerate(given):
        if not isinstance(entry, str) and not (isinstance(entry, list) and entry and _is_ids(entry)):
            where = f"prompt[{index}]"
            raise BadRequest(f"{where}: expected a string or an array of token ids", param=where)
    return given


def _is_ids(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
