"""Steps with several tokens of a sequence, or more sequences than a graph takes: of any size, layer by layer.

Matrices are torch's products; experts are computed on the GPU whatever the strategy, each one that the step routes to
brought there once. Launched one kernel after the other, and nothing is read back.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ftengine.core import Batch, CacheTensors
from ftengine.formats.matrix import QuantMatrix
from ftengine.kernels.triton.attention_prefill import attention_prefill
from ftengine.kernels.triton.buffers import DECODE_TOKENS
from ftengine.kernels.triton.delta_prefill import delta_prefill
from ftengine.kernels.triton.grouped import longest_of_each_kind
from ftengine.kernels.triton.heads import prepare_heads
from ftengine.kernels.triton.linear import embed, linear, linear_large
from ftengine.kernels.triton.norms import rms_norm, swiglu_act
from ftengine.kernels.triton.upload import DeviceSwiGlu
from ftengine.layers.rms_norm import RmsNorm
from ftengine.models.gpu.inputs import PrefillInputs
from ftengine.models.gpu.weights import (
    DeviceAttention,
    DeviceDeltaNet,
    DeviceLinear,
    DeviceMoe,
    DeviceWeights,
)


class PrefillExperts(Protocol):
    def prefill(self, layer: DeviceMoe, hidden: torch.Tensor, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out float32 [T, H] += the routed experts' output for hidden act [T, H].

        logits: float32 [T, router rows], any row stride. Returns the shared expert's weights, float32 [T].
        """
        ...


def prefill_step(weights: DeviceWeights, cache: CacheTensors, batch: Batch, experts: PrefillExperts) -> torch.Tensor:
    """Returns float32 logits [len(batch.logits_rows), V], queued."""
    inputs = PrefillInputs.of(batch, weights.device)
    residual = torch.empty(len(inputs.ids), weights.hidden, device=weights.device)
    embed(weights.embedding, inputs.ids, residual)
    for layer in weights.layers:
        hidden = _normalized(layer.mixer.norm, residual, weights.dtype)
        if isinstance(layer.mixer, DeviceAttention):
            _attention(layer.mixer, weights, cache, inputs, hidden, residual)
        else:
            _delta_net(layer.mixer, cache, inputs, hidden, residual)
        hidden = _normalized(layer.feed_forward.norm, residual, weights.dtype)
        if isinstance(layer.feed_forward, DeviceMoe):
            _moe(layer.feed_forward, experts, hidden, residual)
        else:
            _feed_forward(layer.feed_forward.swiglu, hidden, residual)
    wanted = _normalized(weights.norm, residual[inputs.logits_rows.long()], weights.dtype)
    return product(weights.head, wanted)


def lengths_of_all_kinds(weights: DeviceWeights, page_size: int, longest: int) -> set[int]:
    """Numbers of tokens whose steps launch every kernel, in every form, that a step of up to `longest` tokens does.

    Up to a page's they go another way; Triton compiles apart for 1 and for what 16 divides; experts' tiles have sizes.
    """
    page = min(DECODE_TOKENS, page_size)
    found = {1, 2, page - 1, page, longest}
    for moe in weights.moes:
        found.update(longest_of_each_kind(moe.top_k, weights.hidden, weights.dtype, longest))
    return {length for length in found if 0 < length <= max(longest, page)}


def product(matrix: DeviceLinear, x: torch.Tensor) -> torch.Tensor:
    """x act [T, K] -> float32 [T, N]."""
    if len(x) > DECODE_TOKENS:
        return linear_large(matrix.parts, x, bias=matrix.bias)
    out = torch.empty(len(x), matrix.rows, device=x.device)
    if len(x):
        linear(matrix.parts, x, out, act=x.dtype, bias=matrix.bias)
    return out


def _normalized(norm: RmsNorm, residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    rms_norm(residual, norm.weight, norm.epsilon, out)
    return out


def _attention(
    layer: DeviceAttention,
    weights: DeviceWeights,
    cache: CacheTensors,
    inputs: PrefillInputs,
    hidden: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    keys, values = cache.keys[layer.cache_index], cache.values[layer.cache_index]
    projected = product(layer.qkv, hidden)
    queries = hidden.new_empty(len(hidden), layer.heads, layer.head_dim)
    attended = hidden.new_empty(len(hidden), layer.heads * layer.head_dim)
    norm = None if layer.head_norm is None else (layer.head_norm.weight, layer.head_norm.epsilon)
    prepare_heads(
        projected, norm, weights.rope, inputs.positions, inputs.slot_mapping, keys, values, queries
    )  # fmt: skip
    attention_prefill(
        queries,
        keys,
        values,
        inputs.page_table,
        inputs.query_start,
        inputs.context,
        inputs.longest,
        layer.head_dim**-0.5,
        weights.window,
        projected[:, layer.gate_start :] if layer.gated else None,
        attended,
    )
    residual.add_(product(layer.out, attended))


def _delta_net(
    layer: DeviceDeltaNet, cache: CacheTensors, inputs: PrefillInputs, hidden: torch.Tensor, residual: torch.Tensor
) -> None:
    states = cache.states[layer.cache_index]
    mixed = hidden.new_empty(len(hidden), layer.shape.value_size)
    projected = product(layer.projection, hidden)
    delta_prefill(layer.core, projected, states["window"], states["delta"], inputs.chunks, mixed)
    residual.add_(product(layer.out, mixed))


def _moe(layer: DeviceMoe, experts: PrefillExperts, hidden: torch.Tensor, residual: torch.Tensor) -> None:
    projected = product(layer.projection, hidden)
    gates = experts.prefill(layer, hidden, projected[:, : layer.router_rows], residual)
    if layer.shared_down is not None:
        shared = _swiglu(projected[:, layer.router_rows :], layer.shared_down, hidden.dtype)
        residual.add_(shared.mul_(gates.unsqueeze(1)) if layer.gated else shared)


def _feed_forward(swiglu: DeviceSwiGlu, hidden: torch.Tensor, residual: torch.Tensor) -> None:
    residual.add_(_swiglu(product(DeviceLinear((swiglu.gate_up,)), hidden), swiglu.down, hidden.dtype))


def _swiglu(gate_up: torch.Tensor, down: QuantMatrix, dtype: torch.dtype) -> torch.Tensor:
    """gate_up float32 [T, 2I] -> float32 [T, H]."""
    act = torch.empty(len(gate_up), down.columns, dtype=dtype, device=gate_up.device)
    swiglu_act(gate_up, act)
    return product(DeviceLinear((down,)), act)
