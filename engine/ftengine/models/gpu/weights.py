"""A decoder's dense weights on the device. Routed experts are not among them: `experts/slots.py` has those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from ftengine.formats.format import ExpertLayout
from ftengine.formats.matrix import QuantMatrix
from ftengine.kernels.mixers import DeltaNet
from ftengine.kernels.triton.heads import Rope
from ftengine.kernels.triton.upload import DeviceSwiGlu
from ftengine.layers.gated_delta_net import DeltaNetShape
from ftengine.layers.rms_norm import RmsNorm

SAMPLES = 2  # layers of a kind: the first one's number is 0 or 1, which Triton may take for a constant
ALIGNED = 16  # bytes: Triton's kernels are others for addresses that are no multiples


@dataclass(frozen=True)
class DeviceLinear:
    """parts: natural order, one below the other, `rows` together; bias: float32 [rows]."""

    parts: tuple[QuantMatrix, ...]
    bias: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True)
class DeviceAttention:
    """As layers.attention.Attention."""

    norm: RmsNorm  # of the layer's input
    cache_index: int
    qkv: DeviceLinear
    out: DeviceLinear
    head_norm: RmsNorm | None
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool

    @property
    def gate_start(self) -> int:
        """Column of the projection where the output gates begin."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class DeviceDeltaNet:
    """As layers.gated_delta_net.GatedDeltaNet."""

    norm: RmsNorm
    cache_index: int
    shape: DeltaNetShape
    projection: DeviceLinear
    core: DeltaNet
    out: DeviceLinear


@dataclass(frozen=True)
class DeviceMoe:
    """index: the layer's number among the MoE layers; layout: of its experts' blocks.

    projection: what is computed from the layer's normalized input at once: E router rows, one of the shared expert's
    gate if `gated`, and, if there is a shared expert, its gate and up rows. shared_down: [H, I] of that expert.
    """

    norm: RmsNorm
    index: int
    projection: DeviceLinear
    experts: int
    top_k: int
    normalize: bool
    gated: bool
    layout: ExpertLayout
    shared_down: QuantMatrix | None

    @property
    def router_rows(self) -> int:
        return self.experts + self.gated


@dataclass(frozen=True)
class DeviceFeedForward:
    """A dense SwiGLU layer."""

    norm: RmsNorm
    swiglu: DeviceSwiGlu


@dataclass(frozen=True)
class DeviceLayer:
    mixer: DeviceAttention | DeviceDeltaNet
    feed_forward: DeviceMoe | DeviceFeedForward


@dataclass(frozen=True)
class DeviceWeights:
    """window: keys a query sees, itself included; 0 for all."""

    device: torch.device
    dtype: torch.dtype  # of activations between kernels
    layers: tuple[DeviceLayer, ...]
    embedding: QuantMatrix
    norm: RmsNorm
    head: DeviceLinear
    rope: Rope
    window: int

    @property
    def hidden(self) -> int:
        return self.embedding.columns

    @property
    def vocabulary(self) -> int:
        return self.embedding.rows

    @property
    def attentions(self) -> list[DeviceAttention]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeviceAttention)]

    @property
    def delta_nets(self) -> list[DeviceDeltaNet]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeviceDeltaNet)]

    @property
    def moes(self) -> list[DeviceMoe]:
        return [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, DeviceMoe)]

    @property
    def feed_forwards(self) -> list[DeviceFeedForward]:
        return [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, DeviceFeedForward)]

    def samples(self) -> DeviceWeights:
        """With the first layers of each kind only: what all of them launch differs from it in addresses alone."""
        seen: Counter[Hashable] = Counter()
        kept = []
        for layer in self.layers:
            kind = _kind(layer)
            seen[kind] += 1
            if seen[kind] <= SAMPLES:
                kept.append(layer)
        return replace(self, layers=tuple(kept))


def _kind(value: Any) -> Hashable:
    """What of a layer its kernels' code can depend on: all but its number and the content of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % ALIGNED == 0
    if is_dataclass(value):
        own = [entry.name for entry in fields(value) if entry.name not in ("index", "cache_index")]
        return type(value), *(_kind(getattr(value, name)) for name in own)
    return tuple(map(_kind, value)) if isinstance(value, tuple) else value
