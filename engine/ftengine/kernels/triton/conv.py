"""What Gated DeltaNet does to a chunk of one sequence before and after the delta rule (layers/gated_delta_net.py): the
short causal convolution, unit length of queries and keys, rate and decay; and the gated norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftengine.kernels.mixers import DeltaNet
from ftengine.kernels.triton.captures import Captures
from ftengine.kernels.triton.launch import PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.portable import bound, silu, softplus

TOKEN_BLOCK = 32


@dataclass(frozen=True)
class DeltaInputs:
    """Of the delta rule over T tokens."""

    query: torch.Tensor  # [T, Nk, Dk] activations, of unit length
    key: torch.Tensor  # likewise
    value: torch.Tensor  # [T, Nv, Dv] activations
    decay: torch.Tensor  # float32 [T, Nv], in log space
    rate: torch.Tensor  # float32 [T, Nv]


def convolve(
    layer: DeltaNet,
    projected: torch.Tensor,
    row: int,
    length: int,
    windows: torch.Tensor,
    slot: int,
    fresh: bool,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    captures: Captures,
) -> DeltaInputs:
    """Rows row..row + length of projected, float32 or activations [T, C + Nv * Dv + 2 Nv].

    windows: float32 [slots, W - 1, C]; `slot` of it is read, as zeros if `fresh`, and moved on by the chunk. What it
    would be at the captures is written to their slots.
    heads: Nk, Nv, Dk, Dv. dtype: of queries, keys and values.
    """
    key_heads, value_heads, key_dim, value_dim = heads
    device = projected.device
    query, key = (torch.empty(length, key_heads, key_dim, dtype=dtype, device=device) for _ in range(2))
    value = torch.empty(length, value_heads, value_dim, dtype=dtype, device=device)
    decay, rate = (torch.empty(length, value_heads, dtype=torch.float32, device=device) for _ in range(2))
    _convolve[(2 * key_heads + value_heads, triton.cdiv(length, TOKEN_BLOCK))](
        projected, projected.stride(0), row, length, layer.taps, layer.decay_scale, layer.decay_bias, windows, slot,
        int(fresh), captures.places, captures.count, query, key, value, decay, rate,
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, TAPS=len(layer.taps),
        CHANNELS=windows.shape[2], BLOCK=triton.next_power_of_2(max(key_dim, value_dim)), TOKENS=TOKEN_BLOCK, PDL=PDL,
        num_warps=4, **launch_options(),
    )  # fmt: skip
    return DeltaInputs(query, key, value, decay, rate)


def gated_norm(layer: DeltaNet, core: torch.Tensor, projected: torch.Tensor, row: int, out: torch.Tensor) -> None:
    """core [T, Nv, Dv] of the delta rule -> rows row..row + T of out [.., Nv * Dv] activations; the gate is in the
    same rows of projected, after its C channels."""
    length, value_heads, value_dim = core.shape
    _gated_norm[(length, value_heads)](
        core, projected, projected.stride(0), row, layer.norm, layer.epsilon, out,
        CHANNELS=layer.taps.shape[1], VALUE_HEADS=value_heads, VALUE_DIM=value_dim,
        BLOCK=triton.next_power_of_2(value_dim), PDL=PDL, num_warps=1, **launch_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["row", "length", "slot", "fresh", "count"], do_not_specialize_on_alignment=["captures"])
def _convolve(
    projected, row_stride, row, length, taps, decay_scale, decay_bias, windows, slot, fresh, captures, count, query,
    key, value, decay, rate,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TOKENS rows of one head of queries, keys or values. The first rows' program also keeps windows and moves the
    sequence's on: no other reads it."""
    head, tile = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    start_next(PDL)
    token, dim = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    real = token < length
    source = projected + tl.cast(row, tl.int64) * row_stride
    window = windows + tl.cast(slot, tl.int64) * ((TAPS - 1) * CHANNELS)
    channel, inside = head * KEY_DIM + dim, dim < KEY_DIM
    if head >= 2 * KEY_HEADS:
        channel, inside = 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM + dim, dim < VALUE_DIM

    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        at = token + (tap - (TAPS - 1))
        inputs = source + at.to(tl.int64)[:, None] * row_stride + channel[None, :]
        found = tl.load(inputs, (real & (at >= 0))[:, None] & inside[None, :], 0.0).to(tl.float32)
        past = real & (at < 0) & (fresh == 0)
        kept = window + (at + (TAPS - 1))[:, None] * CHANNELS + channel[None, :]
        found += tl.load(kept, past[:, None] & inside[None, :], 0.0)
        total += found * tl.load(taps + tap * CHANNELS + channel, inside, 0.0)[None, :]
    total = silu(total)
    if tile == 0:
        for number in range(bound(count)):
            end = tl.load(captures + 2 * number)
            to = windows + tl.load(captures + 2 * number + 1).to(tl.int64) * ((TAPS - 1) * CHANNELS)
            _keep_window(to, end, source, row_stride, window, fresh, channel, inside, TAPS, CHANNELS)
        tl.debug_barrier()  # all threads have read the window
        _keep_window(window, length, source, row_stride, window, fresh, channel, inside, TAPS, CHANNELS)

    mask = real[:, None] & inside[None, :]
    if head >= 2 * KEY_HEADS:
        own = head - 2 * KEY_HEADS
        position = token.to(tl.int64)
        tl.store(value + ((position * VALUE_HEADS + own) * VALUE_DIM)[:, None] + dim[None, :], total, mask)
        gates = source + position * row_stride + (CHANNELS + VALUE_HEADS * VALUE_DIM + own)
        faded = softplus(tl.load(gates + VALUE_HEADS, real, 0.0).to(tl.float32) + tl.load(decay_bias + own))
        tl.store(decay + position * VALUE_HEADS + own, tl.load(decay_scale + own) * faded, real)
        tl.store(rate + position * VALUE_HEADS + own, tl.sigmoid(tl.load(gates, real, 0.0).to(tl.float32)), real)
    else:
        total *= tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None]
        place = (token.to(tl.int64) * (KEY_HEADS * KEY_DIM))[:, None] + dim[None, :]
        if head < KEY_HEADS:
            tl.store(query + place + head * KEY_DIM, total, mask)
        else:
            tl.store(key + place + (head - KEY_HEADS) * KEY_DIM, total, mask)


@triton.jit
def _keep_window(
    to, end, source, row_stride, window, fresh, channel, inside, TAPS: tl.constexpr, CHANNELS: tl.constexpr
):
    """The inputs before row `end` of source. Where that is the old window itself, each place is read before a later
    one is written there."""
    for tap in tl.static_range(TAPS - 1):
        last = end - (TAPS - 1) + tap
        newer = tl.load(source + tl.cast(last, tl.int64) * row_stride + channel, inside & (last >= 0), 0.0)
        older = tl.load(window + (end + tap) * CHANNELS + channel, inside & (last < 0) & (fresh == 0), 0.0)
        tl.store(to + tap * CHANNELS + channel, newer + older, inside)


@triton.jit(do_not_specialize=["row"])
def _gated_norm(
    core, projected, row_stride, row, norm, epsilon, out,
    CHANNELS: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token, head, dim = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = dim < VALUE_DIM
    weight = tl.load(norm + dim, inside, 0.0)
    wait_for_previous(PDL)
    start_next(PDL)
    at = head * VALUE_DIM + dim
    values = tl.load(core + token * (VALUE_HEADS * VALUE_DIM) + at, inside, 0.0).to(tl.float32)
    gate = tl.load(projected + (row + token) * row_stride + CHANNELS + at, inside, 0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values) / VALUE_DIM + epsilon)
    tl.store(out + (row + token) * (VALUE_HEADS * VALUE_DIM) + at, values * root * weight * silu(gate), inside)
