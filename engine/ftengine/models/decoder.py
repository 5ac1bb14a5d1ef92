"""The decoder that all served architectures are: mixers and feed-forwards around one float32 residual stream.

An architecture's file builds the layers; nothing here depends on which one it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ftengine.core import Batch, CacheLayout, CacheTensors
from ftengine.layers.attention import Attention
from ftengine.layers.gated_delta_net import GatedDeltaNet
from ftengine.layers.linear import Embedding, Linear
from ftengine.layers.rms_norm import RmsNorm
from ftengine.layers.rotary import Rotary
from ftengine.layers.step import Step


class FeedForward(Protocol):
    def add_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> None:
        """residual [T, H] float32 += output for hidden [T, H]."""
        ...


class NativeForward(Protocol):
    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        """See Model.forward."""
        ...


@dataclass(frozen=True)
class DecoderLayer:
    """cache_index: the layer's place among those of its kind, in CacheTensors.keys or CacheTensors.states."""

    mixer_norm: RmsNorm
    mixer: Attention | GatedDeltaNet
    cache_index: int
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward


@dataclass
class Decoder:
    """Fulfils ftengine.models.base.Model.

    window: keys a query sees, itself included; None for all before it. native: computes the same in one call; without
    it, layer by layer in torch, which is what other implementations are compared with.
    """

    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    cache_layout: CacheLayout
    embedding: Embedding
    layers: list[DecoderLayer]
    norm: RmsNorm
    head: Linear
    rotary: Rotary
    window: int | None = None
    native: NativeForward | None = None

    @torch.no_grad()
    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        """See Model.forward. Returns float32 logits, [len(batch.logits_rows), vocab_size]."""
        if self.native is not None:
            return self.native.forward(batch, cache)
        step = Step(batch, cache.page_size, self.norm.dtype, self.window)
        tables = self.rotary.tables(batch.positions)
        residual = self.embedding(batch.input_ids)
        for layer in self.layers:
            hidden = layer.mixer_norm(residual)
            at = layer.cache_index
            if isinstance(layer.mixer, GatedDeltaNet):
                mixed = layer.mixer(hidden, step, cache.states[at])
            else:
                mixed = layer.mixer(hidden, step, tables, cache.keys[at], cache.values[at])
            residual.add_(mixed)
            layer.feed_forward.add_to(residual, layer.feed_forward_norm(residual))
        return self.head(self.norm(residual[batch.logits_rows]))
