"""Rotary settings from config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ftengine.errors import CheckpointError
from ftengine.layers.rotary import RopeScaling, yarn_attention_factor
from ftengine.models.config import DecoderConfig, Positive

PLAIN_KINDS = ("default", "mrope")  # mrope: for text, the three position axes are equal, which is the plain form
KINDS = (*PLAIN_KINDS, "linear", "llama3", "yarn")


class _Parameters(msgspec.Struct):
    rope_type: str = ""
    type: str = ""
    rope_theta: Positive | None = None
    partial_rotary_factor: Positive | None = None
    factor: Annotated[float, msgspec.Meta(ge=1)] | None = None
    original_max_position_embeddings: Annotated[int, msgspec.Meta(ge=1)] | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    truncate: bool = True
    attention_factor: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


def rope_scaling(config: DecoderConfig, *, theta: float, partial: float = 1.0) -> RopeScaling:
    """theta, partial: the architecture's defaults. Raises CheckpointError for a kind or value that is not served."""
    given: dict[str, Any] = {**(config.rope_scaling or {}), **(config.rope_parameters or {})}
    try:
        parameters = msgspec.convert(given, _Parameters)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the rotary settings in config.json are not usable: {error}") from None
    kind = parameters.rope_type or parameters.type or "default"
    if kind not in KINDS or any(isinstance(value, dict) for value in given.values()):
        raise CheckpointError(f"rotary embedding of the kind {kind[:40]!r} is not served (served: {', '.join(KINDS)})")
    part = parameters.partial_rotary_factor or config.partial_rotary_factor or partial
    rotary_dim = int(config.head_size * part)
    if rotary_dim % 2 or not 0 < rotary_dim <= config.head_size:
        raise CheckpointError(f"rotary embedding over {rotary_dim} of {config.head_size} dimensions is impossible")
    theta = parameters.rope_theta or config.rope_theta or theta
    if kind in PLAIN_KINDS:
        return RopeScaling(theta, rotary_dim)
    original = (
        config.original_max_position_embeddings
        or parameters.original_max_position_embeddings
        or config.max_position_embeddings
    )
    factor = parameters.factor or max(1.0, config.max_position_embeddings / original)
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = parameters.attention_factor or yarn_attention_factor(
            factor, parameters.mscale or 0.0, parameters.mscale_all_dim or 0.0
        )
    if kind == "llama3" and parameters.high_freq_factor <= parameters.low_freq_factor:
        raise CheckpointError("the rotary settings in config.json have high_freq_factor <= low_freq_factor")
    return RopeScaling(
        theta=theta,
        rotary_dim=rotary_dim,
        kind=kind,
        factor=factor,
        original_context=original,
        low_freq_factor=parameters.low_freq_factor,
        high_freq_factor=parameters.high_freq_factor,
        beta_fast=parameters.beta_fast or 32.0,
        beta_slow=parameters.beta_slow or 1.0,
        truncate=parameters.truncate,
        attention_factor=attention_factor,
    )
