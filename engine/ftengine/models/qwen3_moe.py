"""Qwen3 MoE (https://arxiv.org/abs/2505.09388): query and key norms, MoE layers with dense ones among them."""

from __future__ import annotations

from ftengine.models.base import Model, ModelOptions
from ftengine.models.build import Builder
from ftengine.models.config import Count, DecoderConfig, Size, read_config
from ftengine.models.decoder import DecoderLayer, FeedForward
from ftengine.models.rope import rope_scaling
from ftengine.weights.checkpoint import Checkpoint

DEFAULT_THETA = 10_000.0


class Qwen3MoeConfig(DecoderConfig, kw_only=True):
    intermediate_size: Size
    moe_intermediate_size: Size
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None
    use_sliding_window: bool = False

    def is_sparse(self, layer: int) -> bool:
        dense = layer in (self.mlp_only_layers or ())
        return not dense and self.experts > 0 and (layer + 1) % self.decoder_sparse_step == 0


def load(checkpoint: Checkpoint, options: ModelOptions) -> Model:
    config = read_config(checkpoint, Qwen3MoeConfig)
    with Builder(checkpoint, options, config) as builder:
        for index in range(config.num_hidden_layers):
            builder.add(_layer(builder, config, index))
        window = config.sliding_window if config.use_sliding_window else None
        return builder.decoder(rope_scaling(config, theta=DEFAULT_THETA), window=window)


def _layer(builder: Builder, config: Qwen3MoeConfig, index: int) -> DecoderLayer:
    prefix = f"layers.{index}"
    feed_forward: FeedForward
    if config.is_sparse(index):
        feed_forward = builder.moe(index, config.moe_intermediate_size, normalize=config.norm_topk_prob)
    else:
        feed_forward = builder.swiglu(f"{prefix}.mlp", config.intermediate_size)
    return DecoderLayer(
        mixer_norm=builder.norm(f"{prefix}.input_layernorm"),
        mixer=builder.attention(index, head_norms=True),
        cache_index=index,
        feed_forward_norm=builder.norm(f"{prefix}.post_attention_layernorm"),
        feed_forward=feed_forward,
    )
