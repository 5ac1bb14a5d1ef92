"""Recurrent states kept in the middle of a chunk (core.Capture): where they go, and what they are after the library's
chunked rule, which gives the last state only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.launch import PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.portable import EXACT_DOT, bound, dot

TOKEN_BLOCK = 64
COLUMNS = 32  # of a state in one program


@dataclass(frozen=True)
class Captures:
    """Of one sequence's chunk."""

    places: torch.Tensor  # int32 [n, 2] on the device, n at least 1: after how many tokens of the chunk, to which slot
    count: int  # rows of `places` that are meant, ascending by tokens


@functools.cache
def no_captures(device: torch.device) -> Captures:
    return Captures(torch.zeros(1, 2, dtype=torch.int32, device=device), 0)


def keep_states(
    key: torch.Tensor,
    decay: torch.Tensor,
    corrections: torch.Tensor,
    state: torch.Tensor,
    states: torch.Tensor,
    captures: Captures,
) -> None:
    """state float32 [Nv, Dk, Dv] before the chunk -> states [slots, Nv, Dk, Dv] at the captures' slots.

    key: [T, Nk, Dk]; decay: float32 [T, Nv], in log space; corrections: what each token adds to the state along its
    key, [T, Nv, Dv] in the keys' type. Sums are float32, and of products of the same types as in the library's rule.
    """
    value_heads, key_dim, value_dim = state.shape
    columns = min(COLUMNS, triton.next_power_of_2(value_dim))
    _keep_states[(triton.cdiv(value_dim, columns), value_heads)](
        key, corrections, decay, state, states, captures.places, captures.count,
        KEY_HEADS=key.shape[1], VALUE_HEADS=value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_BLOCK=triton.next_power_of_2(key_dim), VALUE_BLOCK=columns, TOKENS=TOKEN_BLOCK,
        EXACT=EXACT_DOT or key.dtype == torch.float32, PDL=PDL, num_warps=4, **launch_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["captures"])
def _keep_states(
    keys, corrections, decays, state, states, captures, count,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, TOKENS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """VALUE_BLOCK columns of one head's state, from capture to capture: tokens in between in blocks of TOKENS."""
    head = tl.program_id(1)
    row, column = tl.arange(0, KEY_BLOCK), tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_row, in_column = row < KEY_DIM, column < VALUE_DIM
    inside = in_row[:, None] & in_column[None, :]
    tile = (head * KEY_DIM + row)[:, None] * VALUE_DIM + column[None, :]
    key_at = (head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + row
    value_at = head * VALUE_DIM + column
    wait_for_previous(PDL)
    start_next(PDL)
    kept = tl.load(state + tile, inside, 0.0)
    start = 0
    for number in range(bound(count)):
        end = tl.load(captures + 2 * number)
        slot = tl.load(captures + 2 * number + 1).to(tl.int64)
        for block in range(bound(tl.cdiv(end - start, TOKENS))):
            token = start + block * TOKENS + tl.arange(0, TOKENS)
            real = token < end
            token = token.to(tl.int64)
            decay = tl.load(decays + token * VALUE_HEADS + head, real, 0.0)
            key_tile = keys + key_at[:, None] + token[None, :] * (KEY_HEADS * KEY_DIM)
            key = tl.load(key_tile, in_row[:, None] & real[None, :], 0.0)
            value_tile = corrections + token[:, None] * (VALUE_HEADS * VALUE_DIM) + value_at[None, :]
            value = tl.load(value_tile, real[:, None] & in_column[None, :], 0.0).to(tl.float32)
            total = tl.sum(decay)
            value *= tl.exp(total - tl.cumsum(decay, 0))[:, None]
            kept = dot(key, value.to(keys.dtype.element_ty), kept * tl.exp(total), EXACT)
        tl.store(states + slot * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + tile, kept, inside)
        start = end
