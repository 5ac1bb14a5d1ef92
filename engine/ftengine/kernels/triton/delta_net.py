"""Decode steps of Gated DeltaNet (layers/gated_delta_net.py): one token of each of T sequences in one launch.

A state of Dk x Dv is read and written once. Each program owns some of the Dv columns, so that one sequence fills the
GPU; the last of the programs that share a key head to arrive applies the gated norm over whole heads and moves the
convolution's window on, which the others have then read. All of it is deterministic: nothing is summed by arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftengine.kernels.mixers import DeltaNet
from ftengine.kernels.triton.launch import PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.portable import silu, softplus
from ftengine.kernels.triton.tuning import Config, bucket, choose

# Columns of a state in one program, and its warps; the first is the default.
CANDIDATES = [{"columns": columns, "warps": warps} for columns, warps in ((32, 4), (16, 2), (16, 4), (64, 4))]


@dataclass(frozen=True)
class DeltaWorkspace:
    """Shared by all layers, one after the other."""

    core: torch.Tensor  # float32 [T, Nv, Dv], before the norm
    arrivals: torch.Tensor  # int32 [T, Nk], zeros between launches

    @staticmethod
    def allocate(
        tokens: int, key_heads: int, value_heads: int, value_dim: int, device: torch.device | str
    ) -> DeltaWorkspace:
        return DeltaWorkspace(
            torch.empty(tokens, value_heads, value_dim, dtype=torch.float32, device=device),
            torch.zeros(tokens, key_heads, dtype=torch.int32, device=device),
        )


def conv_delta_step(
    layer: DeltaNet,
    projected: torch.Tensor,
    windows: torch.Tensor,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    fresh: torch.Tensor,
    workspace: DeltaWorkspace,
    out: torch.Tensor,
) -> None:
    """Convolution, delta rule, gated norm of a token of each of T sequences; capturable.

    projected: float32 [T, C + Nv * Dv + 2 Nv], any row stride: channels, output gate, rate and decay inputs.
    windows: float32 [slots, W - 1, C], states: float32 [slots, Nv, Dk, Dv]; read and written at state_slots int32 [T],
        distinct but for padded rows, which may share a slot that no sequence has.
    fresh: int32 [T], 1: the sequence begins, its window and state count as zeros whatever they hold. Also right for
        padded rows, whose outputs are finite then.
    out: [T, Nv * Dv] activations.
    """
    tokens, key_heads = len(state_slots), workspace.arrivals.shape[1]
    _, value_heads, key_dim, value_dim = states.shape
    repeats, key_block = value_heads // key_heads, triton.next_power_of_2(key_dim)

    def run(config: Config) -> None:
        columns = min(config["columns"], triton.next_power_of_2(value_dim))
        _delta_step[(key_heads, repeats * triton.cdiv(value_dim, columns), tokens)](
            projected, projected.stride(0), layer.taps, layer.decay_scale, layer.decay_bias, layer.norm, layer.epsilon,
            windows, states, state_slots, fresh, workspace.core, workspace.arrivals, out, key_dim**-0.5,
            KEY_HEADS=key_heads, REPEATS=repeats, KEY_DIM=key_dim, VALUE_DIM=value_dim, KEY_BLOCK=key_block,
            VALUE_BLOCK=columns, HEADS_BLOCK=triton.next_power_of_2(repeats),
            NORM_BLOCK=triton.next_power_of_2(value_dim), TAPS=len(layer.taps), PDL=PDL,
            # No element of a state twice: a thread reads what it alone writes.
            num_warps=max(1, min(config["warps"], columns * key_block // 512)), **launch_options(),
        )  # fmt: skip

    run(choose("delta_step", (key_heads, value_heads, key_dim, value_dim, bucket(tokens)), CANDIDATES, run))


@triton.jit(do_not_specialize_on_alignment=["slots", "fresh"])
def _delta_step(
    projected, row_stride, taps, decay_scale, decay_bias, norm, epsilon, windows, states, slots, fresh, core, arrivals,
    out, query_scale,
    KEY_HEADS: tl.constexpr, REPEATS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, HEADS_BLOCK: tl.constexpr, NORM_BLOCK: tl.constexpr,
    TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """VALUE_BLOCK columns of one value head's state a program."""
    group, token = tl.program_id(0), tl.program_id(2)
    SPLITS: tl.constexpr = (VALUE_DIM + VALUE_BLOCK - 1) // VALUE_BLOCK
    CHANNELS: tl.constexpr = (2 * KEY_DIM + REPEATS * VALUE_DIM) * KEY_HEADS
    VALUES: tl.constexpr = REPEATS * VALUE_DIM * KEY_HEADS
    head = group * REPEATS + tl.program_id(1) // SPLITS
    row = tl.arange(0, KEY_BLOCK)
    column = (tl.program_id(1) % SPLITS) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_row, in_column = row < KEY_DIM, column < VALUE_DIM

    # What earlier steps left is loaded before the wait for the projection.
    slot = tl.load(slots + token).to(tl.int64)
    old = tl.load(fresh + token) == 0
    place = (slot * (KEY_HEADS * REPEATS) + head) * (KEY_DIM * VALUE_DIM)
    tile = states + place + row[:, None] * VALUE_DIM + column[None, :]
    inside = in_row[:, None] & in_column[None, :]
    state = tl.load(tile, inside & old, 0.0)
    scale, bias = tl.load(decay_scale + head), tl.load(decay_bias + head)
    query_at = group * KEY_DIM + row
    key_at = query_at + KEY_HEADS * KEY_DIM
    value_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    window = windows + slot * ((TAPS - 1) * CHANNELS)
    query = _past(window, taps, query_at, in_row, old, CHANNELS, TAPS)
    key = _past(window, taps, key_at, in_row, old, CHANNELS, TAPS)
    value = _past(window, taps, value_at, in_column, old, CHANNELS, TAPS)
    last = taps + (TAPS - 1) * CHANNELS
    query_tap, key_tap = tl.load(last + query_at, in_row, 0.0), tl.load(last + key_at, in_row, 0.0)
    value_tap = tl.load(last + value_at, in_column, 0.0)
    wait_for_previous(PDL)
    start_next(PDL)

    token = token.to(tl.int64)
    source = projected + token * row_stride
    new_query = tl.load(source + query_at, in_row, 0.0)
    new_key = tl.load(source + key_at, in_row, 0.0)
    new_value = tl.load(source + value_at, in_column, 0.0)
    rate = tl.sigmoid(tl.load(source + CHANNELS + VALUES + head))
    decay = tl.exp(scale * softplus(tl.load(source + CHANNELS + VALUES + KEY_HEADS * REPEATS + head) + bias))
    query = silu(query + new_query * query_tap)
    key = silu(key + new_key * key_tap)
    value = silu(value + new_value * value_tap)

    # All sums at once, of channels of any length; lengths are divided out after.
    recalled = tl.sum(key[:, None] * state, 0)
    seen = tl.sum(query[:, None] * state, 0)
    overlap = tl.sum(query * key)
    key_unit = tl.rsqrt(tl.sum(key * key) + 1e-6)
    query_unit = tl.rsqrt(tl.sum(query * query) + 1e-6) * query_scale
    correction = rate * (value - decay * key_unit * recalled)
    attended = query_unit * (decay * seen + key_unit * overlap * correction)
    tl.store(tile, decay * state + (key_unit * key)[:, None] * correction[None, :], inside)

    token_values = token * VALUES
    tl.store(core + token_values + head * VALUE_DIM + column, attended, in_column)
    tl.debug_barrier()  # every thread has read the window, and written its part before the arrival says so
    _advance(window, value_at, in_column, old, new_value, CHANNELS, TAPS)
    if tl.atomic_add(arrivals + token * KEY_HEADS + group, 1, sem="acq_rel") == REPEATS * SPLITS - 1:
        tl.store(arrivals + token * KEY_HEADS + group, 0)
        _advance(window, query_at, in_row, old, new_query, CHANNELS, TAPS)
        _advance(window, key_at, in_row, old, new_key, CHANNELS, TAPS)
        _gated_norm(
            core + token_values, source + CHANNELS, out + token_values, group, norm, epsilon,
            REPEATS, VALUE_DIM, HEADS_BLOCK, NORM_BLOCK,
        )  # fmt: skip


@triton.jit
def _gated_norm(
    core, gates, out, group, norm, epsilon,
    REPEATS: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS_BLOCK: tl.constexpr, NORM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the value heads of a key head in a token's rows."""
    heads, dim = tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, NORM_BLOCK)[None, :]
    whole = (heads < REPEATS) & (dim < VALUE_DIM)
    at = (group * REPEATS + heads) * VALUE_DIM + dim
    gate = tl.load(gates + at, whole, 0.0)
    weight = tl.load(norm + dim, dim < VALUE_DIM, 0.0)
    found = tl.load(core + at, whole, 0.0, cache_modifier=".cg")  # other multiprocessors wrote some of it
    root = tl.rsqrt(tl.sum(found * found, 1) / VALUE_DIM + epsilon)
    tl.store(out + at, found * root[:, None] * weight * silu(gate), whole)


@triton.jit
def _past(window, taps, at, inside, old, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """What the window adds to the convolution of the channels `at`."""
    total = tl.zeros(at.shape, tl.float32)
    for tap in tl.static_range(TAPS - 1):
        kept = tl.load(window + tap * CHANNELS + at, inside & old, 0.0)
        total += kept * tl.load(taps + tap * CHANNELS + at, inside, 0.0)
    return total


@triton.jit
def _advance(window, at, inside, old, newest, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Moves the window of the channels `at` on by a token. The element that a thread reads is also its to write."""
    for tap in tl.static_range(TAPS - 2):
        kept = tl.load(window + (tap + 1) * CHANNELS + at, inside & old, 0.0)
        tl.store(window + tap * CHANNELS + at, kept, inside)
    tl.store(window + (TAPS - 2) * CHANNELS + at, newest, inside)
