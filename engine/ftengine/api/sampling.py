"""The sampling fields that all APIs share, their ranges, and how they become the engine's SamplingParams.

Ranges are checked while the body is decoded; docs/api.md lists them.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from ftengine.api.language import SamplingDefaults
from ftengine.core import SamplingParams
from ftengine.errors import BadRequest

T = TypeVar("T")

Count = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TopCount = Annotated[int, Meta(ge=0, le=20)]


class SamplingFields(Struct, kw_only=True, frozen=True):
    """null counts as absent. Fields that an API does not document itself are accepted in all of them."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None  # -1 and 0: off
    min_p: Fraction | None = None
    seed: Int64 | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] | None = None


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    vocab_size: int,
    end_tokens: tuple[int, ...] = (),
    logprobs: int | None = None,
    choice: int = 0,
) -> SamplingParams:
    """`end_tokens`: the dialect's own ends of a turn, which stop an answer unless `ignore_eos` is asked for.
    `choice` moves the seed, so that several answers to one seeded request differ and repeat.

    Raises BadRequest for a token id outside the vocabulary.
    """
    bias = fields.logit_bias or {}
    stops = fields.stop_token_ids or ()
    for name, ids in (("logit_bias", bias), ("stop_token_ids", stops)):
        for token in ids:
            if token >= vocab_size:
                raise BadRequest(f"{name}: token {token} is outside the vocabulary of {vocab_size}", param=name)
    top_k = _or(fields.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(fields.temperature, defaults.temperature),
        top_p=max(_or(fields.top_p, defaults.top_p), 1e-6),  # 0 is allowed by the APIs: the likeliest token alone
        top_k=max(top_k, 0),
        min_p=_or(fields.min_p, defaults.min_p),
        seed=None if fields.seed is None else (fields.seed + choice) & ((1 << 63) - 1),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=bias,
        logprobs=logprobs,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=stops if fields.ignore_eos else tuple(dict.fromkeys((*stops, *end_tokens))),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
