"""Softmax and the k most probable experts of one row of router logits, for kernels; layers/moe.py is the reference."""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST = tl.constexpr(-(2**31))


@triton.jit
def most_probable(x, experts, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, NORMALIZE: tl.constexpr):
    """x: float32 [EP] logits, of which `experts` count.

    -> ids int32 [KP], -1 from K on, of equals the lower id first; weights float32 [KP], 0 from K on; mass float32
    [EP]: softmax(x).
    """
    column, place = tl.arange(0, EP), tl.arange(0, KP)
    inside = column < experts
    # int32 that sort as the logits do, zero without a sign: a warp finds the largest in one instruction.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    keys = tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), SMALLEST + 1)
    keys = tl.where(inside, keys, SMALLEST)
    ids = tl.full((KP,), -1, tl.int32)
    chosen = tl.full((KP,), SMALLEST, tl.int32)
    for k in range(K):
        best = tl.max(keys, 0)
        id = tl.min(tl.where(keys == best, column, EP), 0)
        ids = tl.where(place == k, id, ids)
        chosen = tl.where(place == k, best, chosen)
        keys = tl.where(column == id, SMALLEST, keys)
    logits = (chosen ^ ((chosen >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    logits = tl.where(place < K, logits, float("-inf"))
    peak = tl.max(logits, 0)
    mass = tl.where(inside, tl.exp(x - peak), 0.0)
    total = tl.sum(mass, 0)
    weights = tl.exp(logits - peak)
    scale = 1.0 / total
    if NORMALIZE:
        weights = weights * (1.0 / tl.sum(weights, 0))
    else:
        weights = weights * scale
    return ids, weights, mass * scale


@triton.jit
def total_mass(rows, experts, T: tl.constexpr, EP: tl.constexpr):
    """rows: float32 [T, experts] in memory -> their sum [EP]."""
    column = tl.arange(0, EP)
    mass = tl.zeros((EP,), tl.float32)
    for row in tl.static_range(T):
        mass += tl.load(rows + row * experts + column, column < experts, 0.0)
    return mass
