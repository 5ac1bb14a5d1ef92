"""A decoder's dense weights on the device. Routed experts are not among them: `experts/slots.py` has those."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftengine.formats.format import ExpertLayout
from ftengine.formats.matrix import QuantMatrix
from ftengine.kernels.mixers import DeltaNet
from ftengine.kernels.triton.heads import Rope
from ftengine.kernels.triton.upload import DeviceSwiGlu
from ftengine.layers.gated_delta_net import DeltaNetShape
from ftengine.layers.rms_norm import RmsNorm


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
