"""Causal attention of chunks of several sequences, packed one after the other, over paged keys and values: flash
attention (https://arxiv.org/abs/2307.08691). The query heads that share keys are rows of one tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.launch import PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.portable import EXACT_DOT, Tile, bound, dot, large_shared_memory


def attention_prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    context: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    gate: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> None:
    """One launch. Sums are float32; with float32 queries every product is too.

    queries: [T, N, D] of B sequences; keys, values: [pages, page_size, K, D] of the same dtype, the chunk's own
        included; D a power of two, at least 16.
    page_table: int32 [B, P], row stride any; entries past a sequence's last page are not read.
    query_start: int32 [B + 1], first row of each sequence, and T; context: int32 [B], its keys before those rows.
    longest: the most rows of a sequence, on the host. A sequence may have any number, also one or none.
    window: keys that a query sees, itself included; 0: all.
    gate: float32 or activations [T, N * D], any row stride: its sigmoid multiplies the result; or None.
    out: [T, N * D] activations. tile: instead of the one that fits the device.
    """
    _, heads, dim = queries.shape
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    group = triton.next_power_of_2(heads // kv_heads)
    tile = tile or _tile(queries)
    tokens = max(1, tile.rows // group)
    _attend[(kv_heads, triton.cdiv(longest, tokens), len(context))](
        queries, keys, values, page_table, page_table.stride(0), query_start, context, scale * 1.4426950408889634,
        out if gate is None else gate, 0 if gate is None else gate.stride(0), out,
        WINDOW=window, PAGE=page_size, KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_BLOCK=group, DIM=dim,
        TOKENS=tokens, BLOCK=tile.keys, STAGES=tile.stages, GATED=gate is not None,
        EXACT=EXACT_DOT or queries.dtype == torch.float32, PDL=PDL, num_warps=tile.warps, **launch_options(),
    )  # fmt: skip


def _tile(queries: torch.Tensor) -> Tile:
    """What registers and shared memory of a program take at the head's size."""
    if queries.dtype == torch.float32:
        return Tile(32, 16, 4, 1)
    if not large_shared_memory(queries.device):
        return Tile(64, 32, 4, 2)
    return Tile(128, 64, 8, 2) if queries.shape[2] > 64 else Tile(128, 64, 4, 3)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_table", "query_start", "context"])
def _attend(
    queries, keys, values, page_table, table_stride, query_start, context, scale, gates, gate_stride, out,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TOKENS rows of one sequence for the query heads of a key/value head. The rows with most keys come first."""
    kv_head, sequence = tl.program_id(0), tl.program_id(2)
    wait_for_previous(PDL)
    start_next(PDL)
    first_row = tl.load(query_start + sequence)
    length = tl.load(query_start + sequence + 1) - first_row
    before = tl.load(context + sequence)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    if tile * TOKENS >= length:
        return
    ROWS: tl.constexpr = TOKENS * GROUP_BLOCK
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    token, member = tile * TOKENS + row // GROUP_BLOCK, row % GROUP_BLOCK
    real = (token < length) & (member < GROUP)
    at = ((first_row + token).to(tl.int64) * KV_HEADS + kv_head) * (GROUP * DIM) + member * DIM
    query = tl.load(queries + at[:, None] + dim[None, :], real[:, None], 0.0)

    position = before + token
    low = before + tile * TOKENS  # position of the tile's first row
    end = before + tl.minimum((tile + 1) * TOKENS, length)
    table = page_table + sequence.to(tl.int64) * table_stride
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum = tl.zeros([ROWS, DIM], tl.float32)
    start, seen_by_all = 0, (low + 1) // BLOCK * BLOCK
    if WINDOW:
        start = tl.maximum(low + 1 - WINDOW, 0)
        seen_by_all = start
    for key_at in tl.range(bound(start), bound(seen_by_all), BLOCK, num_stages=STAGES):
        largest, total, sum = _step(
            query, largest, total, sum, keys, values, table, key_at, position, end, kv_head, scale,
            False, WINDOW, PAGE, KV_HEADS, DIM, BLOCK, EXACT,
        )  # fmt: skip
    for key_at in tl.range(bound(seen_by_all), bound(end), BLOCK, num_stages=STAGES):
        largest, total, sum = _step(
            query, largest, total, sum, keys, values, table, key_at, position, end, kv_head, scale,
            True, WINDOW, PAGE, KV_HEADS, DIM, BLOCK, EXACT,
        )  # fmt: skip
    result = sum / tl.where(total > 0.0, total, 1.0)[:, None]  # with a window, rows past the chunk may see nothing
    if GATED:
        gate_at = (first_row + token).to(tl.int64) * gate_stride + (kv_head * GROUP + member) * DIM
        result *= tl.sigmoid(tl.load(gates + gate_at[:, None] + dim[None, :], real[:, None], 0.0).to(tl.float32))
    tl.store(out + at[:, None] + dim[None, :], result, real[:, None])


@triton.jit
def _step(
    query, largest, total, sum, keys, values, table, key_at, position, end, kv_head, scale,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Takes BLOCK keys in. Not MASKED: every row sees all of them."""
    dim, place = tl.arange(0, DIM), key_at + tl.arange(0, BLOCK)
    if MASKED:
        inside = place < end
        page = tl.load(table + place // PAGE, inside, 0).to(tl.int64)
    else:
        page = tl.load(table + place // PAGE).to(tl.int64)
    found = (((page * PAGE + place % PAGE) * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    if MASKED:
        key = tl.load(keys + found, inside[:, None], 0.0)
        value = tl.load(values + found, inside[:, None], 0.0)
    else:
        key, value = tl.load(keys + found), tl.load(values + found)
    score = dot(query, tl.trans(key), tl.zeros([query.shape[0], BLOCK], tl.float32), EXACT) * scale
    if MASKED:
        seen = place[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen & inside[None, :], score, float("-inf"))
    larger = tl.maximum(largest, tl.max(score, 1))
    base = larger
    if WINDOW:
        base = tl.maximum(larger, -1e38)  # a row may see none of the first keys
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(largest - base)
    sum = dot(weight.to(value.dtype), value, sum * shrink[:, None], EXACT)
    return larger, total * shrink + tl.sum(weight, 1), sum
