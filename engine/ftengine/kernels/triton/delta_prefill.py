"""Gated DeltaNet over chunks of sequences (layers/gated_delta_net.py).

The delta rule itself is `fla-core`'s chunked kernels (https://github.com/fla-org/flash-linear-attention) for long
chunks in 16 bits; short chunks, float32, and systems without that library take the recurrence token by token, exact,
with the state in registers. Nothing waits for the device: what is said of the chunks lies on the host.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftengine.kernels.mixers import DeltaNet
from ftengine.kernels.triton.captures import Captures, keep_states, no_captures
from ftengine.kernels.triton.conv import DeltaInputs, convolve, gated_norm
from ftengine.kernels.triton.launch import PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.library_parts import only_parts_of
from ftengine.kernels.triton.portable import bound

log = logging.getLogger("ftengine.delta_prefill")

CHUNK = 64  # tokens of the library's chunks; from one whole chunk on its kernels' settings depend on no length
WARM_UP_TOKENS = 2048
COLUMNS = 16  # of a state in one program of the recurrence
PARTS_OF_FLA = ("ops", "ops.common", "ops.gated_delta_rule", "modules")  # packages whose modules are used, not they


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one sequence."""

    row: int
    length: int
    slot: int  # of its window and state
    fresh: bool  # the sequence begins: they count as zeros whatever they hold
    captures: Captures | None = None


def delta_prefill(
    layer: DeltaNet,
    projected: torch.Tensor,
    windows: torch.Tensor,
    states: torch.Tensor,
    chunks: Sequence[Chunk],
    out: torch.Tensor,
) -> None:
    """The first call with each number and size of heads takes a while on a GPU; none after it compiles anything.

    projected: float32 or activations [T, C + Nv * Dv + 2 Nv], any row stride: channels, gate, rate and decay inputs.
    windows: float32 [slots, W - 1, C], states: float32 [slots, Nv, Dk, Dv]; read and written at the chunks' slots,
    written at their captures', which are none of the chunks'. Captures change nothing else, no bit of it.
    chunks: of any length and in any order. out: [T, Nv * Dv] activations; the chunks' rows are written.
    """
    _, value_heads, key_dim, value_dim = states.shape
    key_heads = (windows.shape[2] - value_heads * value_dim) // (2 * key_dim)
    heads = (key_heads, value_heads, key_dim, value_dim)
    for chunk in chunks:
        if chunk.length == 0:
            continue
        captures = chunk.captures or no_captures(states.device)
        if chunk.fresh:
            states[chunk.slot].zero_()
        inputs = convolve(
            layer, projected, chunk.row, chunk.length, windows, chunk.slot, chunk.fresh, heads, out.dtype, captures
        )
        core = delta_rule(inputs, states, chunk.slot, captures)
        gated_norm(layer, core, projected, chunk.row, out)


def delta_rule(inputs: DeltaInputs, states: torch.Tensor, slot: int, captures: Captures) -> torch.Tensor:
    """Over T tokens of one sequence: [T, Nv, Dv] of values' dtype. states: as of `delta_prefill`."""
    dtype, device = inputs.key.dtype, inputs.key.device
    chunked = _prepared(inputs.key.shape[1], *states.shape[1:], dtype, device) if device.type == "cuda" else None
    if chunked is None or len(inputs.key) < CHUNK:
        return _recurrence(inputs, states, slot, captures)
    return _chunked(chunked, inputs, states, slot, captures)


# Of the library, over T tokens from state float32 [Nv, Dk, Dv] on: [T, Nv, Dv] of values' dtype, each token's
# correction likewise (what it adds to the state along its key), the state after them.
Rule = Callable[[DeltaInputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@functools.cache
def _prepared(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> Rule | None:
    """The library's rule if it takes such heads: its kernels' settings are timed here, at a length that is worth it,
    since it does so at the first call of all. What goes with it is compiled besides."""
    query, key = (torch.zeros(WARM_UP_TOKENS, key_heads, key_dim, dtype=dtype, device=device) for _ in range(2))
    value = torch.zeros(WARM_UP_TOKENS, value_heads, value_dim, dtype=dtype, device=device)
    decay, rate = (torch.zeros(WARM_UP_TOKENS, value_heads, device=device) for _ in range(2))
    states = torch.zeros(1, value_heads, key_dim, value_dim, device=device)
    few, none = slice(0, 1), no_captures(device)
    _recurrence(DeltaInputs(query[few], key[few], value[few], decay[few], rate[few]), states, 0, none)
    chunked = _library() if dtype != torch.float32 and 64 <= key_dim <= 256 else None
    if chunked is not None:
        _chunked(chunked, DeltaInputs(query, key, value, decay, rate), states, 0, none)
        keep_states(key, decay, value, states[0], states, none)
    return chunked


def prepare_again() -> None:
    """The next call prepares anew: after a rehearsal (precompile.py), in which nothing could be timed."""
    _prepared.cache_clear()


def load_library() -> None:
    """Imports what long chunks need; for a thread beside other work."""
    try:
        _library()
    except Exception:  # the first chunk that needs it tells
        log.debug("fla-core cannot be imported", exc_info=True)


def _chunked(rule: Rule, inputs: DeltaInputs, states: torch.Tensor, slot: int, captures: Captures) -> torch.Tensor:
    core, corrections, final = rule(inputs, states[slot])
    if captures.count:
        keep_states(inputs.key, inputs.decay, corrections, states[slot], states, captures)
    states[slot].copy_(final)
    return core


@functools.cache
def _library() -> Rule | None:
    """The steps of its `chunk_gated_delta_rule`, which does not give away the corrections."""
    try:
        with warnings.catch_warnings(), only_parts_of("fla", PARTS_OF_FLA):
            warnings.simplefilter("ignore")
            from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
            from fla.ops.common.chunk_o import chunk_fwd_o
            from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
            from fla.ops.utils import chunk_local_cumsum
            from fla.ops.utils.constant import RCP_LN2
    except ImportError:
        log.warning("prefill of Gated DeltaNet layers is slower than it could be: pip install 'fla-core>=0.6,<0.7'")
        return None

    def rule(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = (inputs.query, inputs.key, inputs.value, inputs.decay, inputs.rate)
        q, k, v, g, beta = (part.unsqueeze(0) for part in parts)
        g = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2)
        w, u, _ = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, chunk_size=CHUNK)
        h, corrections, final = chunk_gated_delta_rule_fwd_h(
            k=k, w=w, u=u, g=g, initial_state=state.unsqueeze(0), output_final_state=True, chunk_size=CHUNK
        )
        core = chunk_fwd_o(q=q, k=k, v=corrections, h=h, g=g, scale=k.shape[-1] ** -0.5, chunk_size=CHUNK)
        return core[0], corrections[0], final[0]

    return rule


def _recurrence(inputs: DeltaInputs, states: torch.Tensor, slot: int, captures: Captures) -> torch.Tensor:
    core = torch.empty_like(inputs.value)
    length, key_heads, key_dim = inputs.key.shape
    value_heads, value_dim = core.shape[1:]
    columns = min(COLUMNS, triton.next_power_of_2(value_dim))
    _delta_rule[(triton.cdiv(value_dim, columns), value_heads)](
        inputs.query, inputs.key, inputs.value, inputs.decay, inputs.rate, states, slot, captures.places,
        captures.count, core, length, key_dim**-0.5,
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_BLOCK=triton.next_power_of_2(key_dim), VALUE_BLOCK=columns, PDL=PDL, num_warps=1, **launch_options(),
    )  # fmt: skip
    return core


@triton.jit(do_not_specialize=["slot", "count", "length"], do_not_specialize_on_alignment=["captures"])
def _delta_rule(
    queries, keys, values, decays, rates, states, slot, captures, count, core, length, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """VALUE_BLOCK columns of one head's state; the next token is loaded while this one is computed."""
    head = tl.program_id(1)
    row, column = tl.arange(0, KEY_BLOCK), tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_row, in_column = row < KEY_DIM, column < VALUE_DIM
    wait_for_previous(PDL)
    start_next(PDL)
    tile = states + (head * KEY_DIM + row)[:, None] * VALUE_DIM + column[None, :]
    own = tile + tl.cast(slot, tl.int64) * (VALUE_HEADS * KEY_DIM * VALUE_DIM)
    inside = in_row[:, None] & in_column[None, :]
    state = tl.load(own, inside, 0.0)
    kept, keep_after = 0, tl.load(captures, count > 0, 0)
    key_at = (head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + row
    value_at = head * VALUE_DIM + column
    query = tl.load(queries + key_at, in_row, 0.0)
    key = tl.load(keys + key_at, in_row, 0.0)
    value = tl.load(values + value_at, in_column, 0.0)
    decay, rate = tl.load(decays + head), tl.load(rates + head)
    for token in range(bound(length)):
        after = tl.minimum(token + 1, length - 1).to(tl.int64)
        next_query = tl.load(queries + after * (KEY_HEADS * KEY_DIM) + key_at, in_row, 0.0)
        next_key = tl.load(keys + after * (KEY_HEADS * KEY_DIM) + key_at, in_row, 0.0)
        next_value = tl.load(values + after * (VALUE_HEADS * VALUE_DIM) + value_at, in_column, 0.0)
        next_decay = tl.load(decays + after * VALUE_HEADS + head)
        next_rate = tl.load(rates + after * VALUE_HEADS + head)
        state *= tl.exp(decay)
        recalled = tl.sum(key.to(tl.float32)[:, None] * state, 0)
        correction = rate * (value.to(tl.float32) - recalled)
        state += key.to(tl.float32)[:, None] * correction[None, :]
        found = tl.sum(query.to(tl.float32)[:, None] * state, 0) * scale
        tl.store(core + tl.cast(token, tl.int64) * (VALUE_HEADS * VALUE_DIM) + value_at, found, in_column)
        query, key, value, decay, rate = next_query, next_key, next_value, next_decay, next_rate
        while keep_after == token + 1:
            to = tl.load(captures + 2 * kept + 1).to(tl.int64)
            tl.store(tile + to * (VALUE_HEADS * KEY_DIM * VALUE_DIM), state, inside)
            kept += 1
            keep_after = tl.load(captures + 2 * kept, kept < count, 0)
    tl.store(own, state, inside)
