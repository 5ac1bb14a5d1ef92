"""What lies between the projection of an attention layer and attention itself, in one launch: the norm of each query
and key head, the rotary embedding (layers/rotary.py), and writing keys and values into the paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.launch import PDL, launch_options, start_next, wait_for_previous


@dataclass(frozen=True)
class Rope:
    """Pairs (i, i + R/2) of each head's first R dimensions are turned by position * frequencies[i]."""

    frequencies: torch.Tensor  # float32 [R/2]
    attention_factor: float = 1.0  # scales cosine and sine


def prepare_heads(
    projected: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    rope: Rope,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """Any number of tokens T; capturable. Everything is computed in float32 and rounded once.

    projected: float32 or activations [T, >= (N + 2K) * D]: query heads, key heads, value heads; any row stride.
    norm: per head, weight float32 [N + K, D] and epsilon; or None.
    positions: int32 or int64 [T], each >= 0 and, times a frequency, below 2^31.
    slot_mapping: int32 or int64 [T], page * page_size + offset, where a token's key and value go.
    keys, values: the layer's cache, [pages, page_size, K, D], written. queries: [T, N, D], written.
    """
    tokens, heads, dim = queries.shape
    half, rest = len(rope.frequencies), dim - 2 * len(rope.frequencies)
    weight, epsilon = norm if norm is not None else (projected, 0.0)
    _prepare_heads[(tokens, heads + 2 * keys.shape[2])](
        projected, projected.stride(0), weight, epsilon, rope.frequencies, rope.attention_factor, positions,
        slot_mapping, queries, keys, values,
        HEADS=heads, KV_HEADS=keys.shape[2], DIM=dim, HALF=half, HALF_BLOCK=triton.next_power_of_2(max(half, 1)),
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0, NORM=norm is not None, PDL=PDL,
        num_warps=1, **launch_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _prepare_heads(
    projected, row_stride, weight, epsilon, frequencies, attention_factor, positions, slots, queries, keys, values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token a program. REST_BLOCK covers the dimensions that are not turned, 0: there are none."""
    token, head = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, HALF_BLOCK)
    paired = pair < HALF
    frequency = tl.load(frequencies + pair, paired, 0.0)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    cosine, sine = _cosine_sine(angle)
    slot = tl.load(slots + token).to(tl.int64)
    wait_for_previous(PDL)
    start_next(PDL)

    row = projected + token.to(tl.int64) * row_stride + head * DIM
    first = tl.load(row + pair, paired, 0.0).to(tl.float32)
    second = tl.load(row + HALF + pair, paired, 0.0).to(tl.float32)
    if REST_BLOCK:
        others = 2 * HALF + tl.arange(0, REST_BLOCK)
        kept = tl.load(row + others, others < DIM, 0.0).to(tl.float32)

    target, place = values, slot * KV_HEADS + head - HEADS - KV_HEADS
    if head < HEADS:
        target, place = queries, token.to(tl.int64) * HEADS + head
    elif head < HEADS + KV_HEADS:
        target, place = keys, slot * KV_HEADS + head - HEADS
    target += place * DIM
    if head < HEADS + KV_HEADS:
        if NORM:
            total = tl.sum(first * first) + tl.sum(second * second)
            if REST_BLOCK:
                total += tl.sum(kept * kept)
            root = tl.rsqrt(total / DIM + epsilon)
            own = weight + head * DIM
            first *= root * tl.load(own + pair, paired, 0.0)
            second *= root * tl.load(own + HALF + pair, paired, 0.0)
            if REST_BLOCK:
                kept *= root * tl.load(own + others, others < DIM, 0.0)
        cosine, sine = cosine * attention_factor, sine * attention_factor
        first, second = first * cosine - second * sine, second * cosine + first * sine
    tl.store(target + pair, first, paired)
    tl.store(target + HALF + pair, second, paired)
    if REST_BLOCK:
        tl.store(target + others, kept, others < DIM)


@triton.jit
def _cosine_sine(angle):
    """Of angle >= 0, float32, to about one unit in the last place: the GPU's own are approximations that go wrong at
    large arguments. Quarter turns are taken off in float64; polynomials for |x| <= pi/4 from Cephes' sinf and cosf."""
    turns = (angle.to(tl.float64) * 0.6366197723675814 + 0.5).to(tl.int32)  # nearest multiple of pi / 2
    x = (angle.to(tl.float64) - turns.to(tl.float64) * 1.5707963267948966).to(tl.float32)
    z = x * x
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cosine = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    swapped = (turns & 1) == 1
    c, s = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    return tl.where(((turns + 1) & 2) == 2, -c, c), tl.where((turns & 2) == 2, -s, s)
