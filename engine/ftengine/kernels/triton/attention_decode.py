"""Attention of one new token of each of B sequences over paged keys and values, split over the keys (flash decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html), with the output gate.

The grid depends on nothing but shapes: each sequence's keys are cut on the device, by its length, into as many equal
parts as the grid has, in whole blocks; parts without a block end at once and are not combined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.launch import PDL, launch_options, multiprocessors, start_next, wait_for_previous
from ftengine.kernels.triton.portable import EXACT_DOT, Tile, bound, dot, large_shared_memory

GROUP_ROWS = 16  # the smallest tile of tl.dot; query heads of a group beside padding
MAX_SPLITS = 64  # the combining kernel holds all parts of a head at once
COMBINED_COLUMNS = 64


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results, shared by all layers, one after the other."""

    sums: torch.Tensor  # float32, flat: [B, N, splits, D]
    weights: torch.Tensor  # float32, flat: [B, N, splits, 2], the largest score and the sum of exponentials
    programs: int  # that the device takes at once

    @staticmethod
    def allocate(
        tokens: int, heads: int, kv_heads: int, head_dim: int, context: int, device: torch.device | str
    ) -> DecodeWorkspace:
        """For up to `tokens` sequences of up to `context` tokens each."""
        programs = multiprocessors(torch.device(device))
        blocks = triton.cdiv(context, 16)
        parts = max(count * splits(count * kv_heads, blocks, programs) for count in range(1, tokens + 1))
        return DecodeWorkspace(
            torch.empty(parts * heads * head_dim, dtype=torch.float32, device=device),
            torch.empty(parts * heads * 2, dtype=torch.float32, device=device),
            programs,
        )


def splits(groups: int, blocks: int, programs: int) -> int:
    """Parts of each sequence's keys: a power of two, about one program for each of the device's multiprocessors."""
    wanted = max(1, min(programs // groups, blocks, MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)


def attention_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int,
    gate: torch.Tensor | None,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> None:
    """Two launches; capturable. Sums are float32; with float32 queries every product is too.

    queries: [B, N, D]; keys, values: [pages, page_size, K, D] of the same dtype; D a power of two, at least 16.
    page_table: int32 [B, P], row stride any; entries past a sequence's last page are not read.
    lengths: int32 [B], keys of each sequence, its new token's included; 0: a padded row, its output is zeros.
    window: keys that a query sees, itself included; 0: all.
    gate: float32 [B, N * D], any row stride: its sigmoid multiplies the result; or None.
    out: [B, N * D] activations. tile: instead of the one that fits the device.
    """
    batch, heads, dim = queries.shape
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    tile = tile or _tile(keys)
    group = heads // kv_heads
    parts = splits(batch * kv_heads, triton.cdiv(page_table.shape[1] * page_size, tile.keys), workspace.programs)
    _attend[(parts, kv_heads, batch)](
        queries, keys, values, page_table, page_table.stride(0), lengths, scale * 1.4426950408889634,
        workspace.sums, workspace.weights,
        WINDOW=window, PAGE=page_size, KV_HEADS=kv_heads, GROUP=group, DIM=dim,
        ROWS=max(tile.rows, triton.next_power_of_2(group)), BLOCK=tile.keys, SPLITS=parts, STAGES=tile.stages,
        EXACT=EXACT_DOT or queries.dtype == torch.float32, PDL=PDL, num_warps=tile.warps, **launch_options(),
    )  # fmt: skip
    columns = min(COMBINED_COLUMNS, dim)
    _combine[(dim // columns, heads, batch)](
        workspace.sums, workspace.weights, lengths, out if gate is None else gate,
        0 if gate is None else gate.stride(0), out,
        WINDOW=window, HEADS=heads, DIM=dim, BLOCK=tile.keys, SPLITS=parts, COLUMNS=columns, GATED=gate is not None,
        PDL=PDL, num_warps=4, **launch_options(),
    )  # fmt: skip


def _tile(keys: torch.Tensor) -> Tile:
    """32 KB each of keys and values where there is room, else 16 KB."""
    large = keys.element_size() == 2 and large_shared_memory(keys.device)
    size = (32768 if large else 16384) // (keys.shape[-1] * keys.element_size())
    return Tile(GROUP_ROWS, max(16, min(64, size)), 4, 2)


@triton.jit
def _extent(length, part, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """The first key that is seen, and the part's range of keys."""
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    blocks = tl.cdiv(tl.cdiv(length - first, BLOCK), SPLITS)
    start = first + part * blocks * BLOCK
    return start, tl.minimum(start + blocks * BLOCK, length)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_table", "lengths"])
def _attend(
    queries, keys, values, page_table, table_stride, lengths, scale, sums, weights,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One part of the keys for the GROUP query heads of a key/value head. scale: of scores as exponents of two."""
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    start, end = _extent(length, part, WINDOW, BLOCK, SPLITS)
    wait_for_previous(PDL)
    start_next(PDL)
    if start >= end:
        return
    head, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    place = (row * KV_HEADS + kv_head) * GROUP + head
    query = tl.load(queries + place[:, None] * DIM + dim[None, :], head[:, None] < GROUP, 0.0)
    table = page_table + row.to(tl.int64) * table_stride
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum = tl.zeros([ROWS, DIM], tl.float32)
    for at in tl.range(bound(start), bound(end), BLOCK, num_stages=STAGES):
        position = at + tl.arange(0, BLOCK)
        valid = position < end
        page = tl.load(table + position // PAGE, valid, 0).to(tl.int64)
        found = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM
        key = tl.load(keys + found[:, None] + dim[None, :], valid[:, None], 0.0)
        value = tl.load(values + found[:, None] + dim[None, :], valid[:, None], 0.0)
        score = dot(query, tl.trans(key), tl.zeros([ROWS, BLOCK], tl.float32), EXACT)
        score = tl.where(valid[None, :], score * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        shrink = tl.exp2(largest - larger)
        weight = tl.exp2(score - larger[:, None])
        total = total * shrink + tl.sum(weight, 1)
        sum = dot(weight.to(value.dtype), value, sum * shrink[:, None], EXACT)
        largest = larger
    partial = place * SPLITS + part
    tl.store(sums + partial[:, None] * DIM + dim[None, :], sum, head[:, None] < GROUP)
    tl.store(weights + 2 * partial, largest, head < GROUP)
    tl.store(weights + 2 * partial + 1, total, head < GROUP)


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def _combine(
    sums, weights, lengths, gates, gate_stride, out,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, SPLITS)
    start, end = _extent(tl.load(lengths + row), part, WINDOW, BLOCK, SPLITS)
    used = start < end
    wait_for_previous(PDL)
    start_next(PDL)
    place = row * HEADS + head
    partial = place * SPLITS + part
    largest = tl.load(weights + 2 * partial, used, float("-inf"))
    total = tl.load(weights + 2 * partial + 1, used, 0.0)
    sum = tl.load(sums + partial[:, None] * DIM + column[None, :], used[:, None], 0.0)
    weight = tl.exp2(largest - tl.maximum(tl.max(largest, 0), -1e38))  # all are -inf in a padded row
    whole = tl.sum(weight * total, 0)
    result = tl.sum(weight[:, None] * sum, 0) / tl.where(whole > 0.0, whole, 1.0)
    if GATED:
        result *= tl.sigmoid(tl.load(gates + row.to(tl.int64) * gate_stride + head * DIM + column))
    tl.store(out + place * DIM + column, result)
