"""Buffers of a decode step, allocated once: a captured graph holds their addresses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ftengine.kernels.triton.attention_decode import DecodeWorkspace
from ftengine.kernels.triton.delta_net import DeltaWorkspace
from ftengine.models.gpu.weights import DeviceWeights


@dataclass(frozen=True)
class DecodeBuffers:
    """What one layer after the other uses in a step of B tokens."""

    residual: torch.Tensor  # float32 [B, H]
    normalized: torch.Tensor  # act [B, H]
    logits: torch.Tensor  # float32 [B, V]
    attention: DecodeWorkspace | None
    delta: DeltaWorkspace | None
    _projected: torch.Tensor  # float32, flat
    _mixed: torch.Tensor  # act, flat
    _queries: torch.Tensor  # act, flat

    def projected(self, columns: int) -> torch.Tensor:
        """float32 [B, columns]: what a layer's first product gives."""
        return _shaped(self._projected, len(self.residual), columns)

    def mixed(self, columns: int) -> torch.Tensor:
        """act [B, columns]: what a layer's last product takes."""
        return _shaped(self._mixed, len(self.residual), columns)

    def queries(self, heads: int, size: int) -> torch.Tensor:
        """act [B, heads, size]."""
        return _shaped(self._queries, len(self.residual), heads, size)


class Workspace:
    """Storage for steps of up to `tokens` tokens, shared by all their sizes. context: tokens of a sequence."""

    def __init__(self, weights: DeviceWeights, tokens: int, context: int) -> None:
        attentions, delta_nets, device = weights.attentions, weights.delta_nets, weights.device
        self._weights = weights
        self._projected = torch.empty(tokens * _projected_columns(weights), device=device)
        self._mixed = torch.empty(tokens * _mixed_columns(weights), dtype=weights.dtype, device=device)
        queries = max((layer.heads * layer.head_dim for layer in attentions), default=0)
        self._queries = torch.empty(tokens * queries, dtype=weights.dtype, device=device)
        self._residual = torch.zeros(tokens, weights.hidden, device=device)
        self._normalized = torch.zeros(tokens, weights.hidden, dtype=weights.dtype, device=device)
        self._logits = torch.zeros(tokens, weights.vocabulary, device=device)
        self._attention: DecodeWorkspace | None = None
        if attentions:
            one = attentions[0]
            self._attention = DecodeWorkspace.allocate(tokens, one.heads, one.kv_heads, one.head_dim, context, device)
        self._delta: DeltaWorkspace | None = None
        if delta_nets:
            shape = delta_nets[0].shape
            self._delta = DeltaWorkspace.allocate(tokens, shape.key_heads, shape.value_heads, shape.value_dim, device)

    def of(self, rows: int) -> DecodeBuffers:
        return DecodeBuffers(
            self._residual[:rows],
            self._normalized[:rows],
            self._logits[:rows],
            self._attention,
            self._delta,
            self._projected,
            self._mixed,
            self._queries,
        )


def _shaped(storage: torch.Tensor, *shape: int) -> torch.Tensor:
    return storage[: math.prod(shape)].view(shape)


def _projected_columns(weights: DeviceWeights) -> int:
    return max(
        *(layer.qkv.rows for layer in weights.attentions),
        *(layer.projection.rows for layer in weights.delta_nets),
        *(layer.projection.rows for layer in weights.moes),
        *(2 * layer.swiglu.intermediate for layer in weights.feed_forwards),
        0,
        0,
    )


def _mixed_columns(weights: DeviceWeights) -> int:
    return max(
        *(layer.heads * layer.head_dim for layer in weights.attentions),
        *(layer.shape.value_size for layer in weights.delta_nets),
        *(0 if layer.shared_down is None else layer.shared_down.columns for layer in weights.moes),
        *(layer.swiglu.intermediate for layer in weights.feed_forwards),
        0,
        0,
    )
