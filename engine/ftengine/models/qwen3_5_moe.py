"""Qwen3.5 / Qwen3.6 MoE: Gated DeltaNet layers with gated full attention among them, a shared expert in each MoE."""

from __future__ import annotations

import torch

from ftengine.errors import CheckpointError
from ftengine.layers.gated_delta_net import DeltaNetShape, GatedDeltaNet
from ftengine.layers.rms_norm import RmsNorm
from ftengine.models.base import Model, ModelOptions
from ftengine.models.build import Builder
from ftengine.models.config import Count, DecoderConfig, Size, read_config
from ftengine.models.decoder import DecoderLayer
from ftengine.models.rope import rope_scaling
from ftengine.weights.checkpoint import Checkpoint

DEFAULT_THETA = 10_000.0
DEFAULT_ROTARY_PART = 0.25
LINEAR, FULL = "linear_attention", "full_attention"


class Qwen35MoeConfig(DecoderConfig, kw_only=True):
    head_dim: Size | None = 256
    moe_intermediate_size: Size
    shared_expert_intermediate_size: Size
    linear_num_key_heads: Count
    linear_num_value_heads: Count
    linear_key_head_dim: Count
    linear_value_head_dim: Count
    linear_conv_kernel_dim: Count = 4
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4

    def kinds(self) -> list[str]:
        """LINEAR or FULL for each layer."""
        layers = range(1, self.num_hidden_layers + 1)
        kinds = self.layer_types or [LINEAR if layer % self.full_attention_interval else FULL for layer in layers]
        if len(kinds) < self.num_hidden_layers or set(kinds) - {LINEAR, FULL}:
            raise CheckpointError("layer_types in config.json does not give each layer one of the two kinds")
        return kinds[: self.num_hidden_layers]

    def delta_shape(self) -> DeltaNetShape:
        if self.linear_num_value_heads % self.linear_num_key_heads or self.linear_conv_kernel_dim < 2:
            raise CheckpointError("the linear attention settings in config.json do not fit together")
        return DeltaNetShape(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            kernel=self.linear_conv_kernel_dim,
        )


def load(checkpoint: Checkpoint, options: ModelOptions) -> Model:
    config = read_config(checkpoint, Qwen35MoeConfig)
    kinds, shape = config.kinds(), config.delta_shape()
    rope = rope_scaling(config, theta=DEFAULT_THETA, partial=DEFAULT_ROTARY_PART)
    with Builder(checkpoint, options, config, one_plus=True) as builder:
        for index in range(config.num_hidden_layers):
            builder.add(_layer(builder, config, shape, kinds, index))
        return builder.decoder(rope, states=(shape.states(),) * kinds.count(LINEAR))


def _layer(
    builder: Builder, config: Qwen35MoeConfig, shape: DeltaNetShape, kinds: list[str], index: int
) -> DecoderLayer:
    prefix, kind = f"layers.{index}", kinds[index]
    full = kind == FULL
    return DecoderLayer(
        mixer_norm=builder.norm(f"{prefix}.input_layernorm"),
        mixer=builder.attention(index, head_norms=True, gated=True) if full else _delta_net(builder, shape, prefix),
        cache_index=kinds[:index].count(kind),
        feed_forward_norm=builder.norm(f"{prefix}.post_attention_layernorm"),
        feed_forward=builder.moe(
            index, config.moe_intermediate_size, shared_intermediate=config.shared_expert_intermediate_size
        ),
    )


def _delta_net(builder: Builder, shape: DeltaNetShape, prefix: str) -> GatedDeltaNet:
    loader, hidden, prefix = builder.loader, builder.config.hidden_size, f"{prefix}.linear_attn"
    rows = [
        ("in_proj_qkv", shape.channels),
        ("in_proj_z", shape.value_size),
        ("in_proj_b", shape.value_heads),
        ("in_proj_a", shape.value_heads),
    ]
    taps = loader.take(f"{prefix}.conv1d.weight", shape.channels, 1, shape.kernel)
    # This norm multiplies by w, not by 1 + w as the model's others do.
    norm_weight = loader.take(f"{prefix}.norm.weight", shape.value_dim)
    return GatedDeltaNet(
        shape=shape,
        projection=builder.stacked([(f"{prefix}.{name}", count) for name, count in rows], hidden),
        taps=taps.squeeze(1).T.contiguous(),
        decay_scale=-loader.take(f"{prefix}.A_log", shape.value_heads).exp(),
        decay_bias=loader.take(f"{prefix}.dt_bias", shape.value_heads),
        norm=RmsNorm(norm_weight, builder.config.rms_norm_eps, torch.float32),
        out=builder.linear(f"{prefix}.out_proj", hidden, shape.value_size),
    )
