"""One token of each of B sequences through all layers: launches of fixed shape, which a graph can hold.

No value is read back and nothing is allocated; whatever depends on the step lies in DecodeInputs and in the cache.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ftengine.core import CacheTensors
from ftengine.kernels.triton.attention_decode import attention_decode
from ftengine.kernels.triton.delta_net import conv_delta_step
from ftengine.kernels.triton.heads import prepare_heads
from ftengine.kernels.triton.linear import embed, linear
from ftengine.kernels.triton.norms import swiglu_act
from ftengine.layers.rms_norm import RmsNorm
from ftengine.models.gpu.inputs import DecodeInputs
from ftengine.models.gpu.weights import (
    DeviceAttention,
    DeviceDeltaNet,
    DeviceFeedForward,
    DeviceMoe,
    DeviceWeights,
)
from ftengine.models.gpu.workspace import DecodeBuffers


class DecodeExperts(Protocol):
    asking: bool  # whether what is launched now may ask the CPU

    def forms(self, rows: int) -> tuple[bool, ...]:
        """What `asking` may be in steps of so many rows."""
        ...

    def decode(self, layer: DeviceMoe, buffers: DecodeBuffers) -> None:
        """residual += the MoE layer's output for it."""
        ...

    def end_layers(self) -> None:
        """After the last layer, before the head."""
        ...

    def end_step(self) -> None: ...


def decode_step(
    weights: DeviceWeights, cache: CacheTensors, inputs: DecodeInputs, buffers: DecodeBuffers, experts: DecodeExperts
) -> None:
    """Leaves the logits in buffers.logits."""
    embed(weights.embedding, inputs.ids, buffers.residual)
    for layer in weights.layers:
        if isinstance(layer.mixer, DeviceAttention):
            _attention(layer.mixer, weights, cache, inputs, buffers)
        else:
            _delta_net(layer.mixer, cache, inputs, buffers)
        if isinstance(layer.feed_forward, DeviceMoe):
            experts.decode(layer.feed_forward, buffers)
        else:
            _feed_forward(layer.feed_forward, buffers)
    experts.end_layers()
    head = weights.head
    linear(
        head.parts, buffers.residual, buffers.logits, norm=pair(weights.norm), bias=head.bias, act=weights.dtype
    )  # fmt: skip
    experts.end_step()


def pair(norm: RmsNorm) -> tuple[torch.Tensor, float]:
    """As kernels take it."""
    return norm.weight, norm.epsilon


def _attention(
    layer: DeviceAttention, weights: DeviceWeights, cache: CacheTensors, inputs: DecodeInputs, buffers: DecodeBuffers
) -> None:
    keys, values = cache.keys[layer.cache_index], cache.values[layer.cache_index]
    projected = buffers.projected(layer.qkv.rows)
    queries = buffers.queries(layer.heads, layer.head_dim)
    mixed = buffers.mixed(layer.heads * layer.head_dim)
    assert buffers.attention is not None
    linear(layer.qkv.parts, buffers.residual, projected, norm=pair(layer.norm), bias=layer.qkv.bias, act=weights.dtype)
    prepare_heads(
        projected,
        None if layer.head_norm is None else pair(layer.head_norm),
        weights.rope,
        inputs.positions,
        inputs.slot_mapping,
        keys,
        values,
        queries,
    )
    attention_decode(
        queries,
        keys,
        values,
        inputs.page_table,
        inputs.lengths,
        layer.head_dim**-0.5,
        weights.window,
        projected[:, layer.gate_start :] if layer.gated else None,
        buffers.attention,
        mixed,
    )
    linear(layer.out.parts, mixed, buffers.residual, bias=layer.out.bias, add=True)


def _delta_net(layer: DeviceDeltaNet, cache: CacheTensors, inputs: DecodeInputs, buffers: DecodeBuffers) -> None:
    states = cache.states[layer.cache_index]
    projected, mixed = buffers.projected(layer.projection.rows), buffers.mixed(layer.shape.value_size)
    assert buffers.delta is not None
    linear(layer.projection.parts, buffers.residual, projected, norm=pair(layer.norm), act=mixed.dtype)
    conv_delta_step(
        layer.core,
        projected,
        states["window"],
        states["delta"],
        inputs.state_slots,
        inputs.fresh,
        buffers.delta,
        mixed,
    )
    linear(layer.out.parts, mixed, buffers.residual, add=True)


def _feed_forward(layer: DeviceFeedForward, buffers: DecodeBuffers) -> None:
    swiglu = layer.swiglu
    projected, mixed = buffers.projected(2 * swiglu.intermediate), buffers.mixed(swiglu.intermediate)
    linear((swiglu.gate_up,), buffers.residual, projected, norm=pair(layer.norm), act=mixed.dtype)
    swiglu_act(projected, mixed)
    linear((swiglu.down,), mixed, buffers.residual, add=True)
