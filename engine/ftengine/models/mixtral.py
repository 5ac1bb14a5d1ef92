"""Mixtral (https://arxiv.org/abs/2401.04088): attention with rotary embedding, every feed-forward a MoE."""

from __future__ import annotations

from ftengine.models.base import Model, ModelOptions
from ftengine.models.build import Builder
from ftengine.models.config import DecoderConfig, Size, read_config
from ftengine.models.decoder import DecoderLayer
from ftengine.models.rope import rope_scaling
from ftengine.weights.checkpoint import Checkpoint

DEFAULT_THETA = 1e6


class MixtralConfig(DecoderConfig, kw_only=True):
    intermediate_size: Size
    rms_norm_eps: float = 1e-5


def load(checkpoint: Checkpoint, options: ModelOptions) -> Model:
    config = read_config(checkpoint, MixtralConfig)
    with Builder(checkpoint, options, config) as builder:
        for index in range(config.num_hidden_layers):
            builder.add(_layer(builder, config, index))
        return builder.decoder(rope_scaling(config, theta=DEFAULT_THETA), window=config.sliding_window)


def _layer(builder: Builder, config: MixtralConfig, index: int) -> DecoderLayer:
    prefix = f"layers.{index}"
    return DecoderLayer(
        mixer_norm=builder.norm(f"{prefix}.input_layernorm"),
        mixer=builder.attention(index, head_norms=False),
        cache_index=index,
        feed_forward_norm=builder.norm(f"{prefix}.post_attention_layernorm"),
        feed_forward=builder.moe(index, config.intermediate_size),
    )
