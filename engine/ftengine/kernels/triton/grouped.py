"""Routed experts of many tokens: tokens by expert in tiles, weights decoded on their way to the product."""

from __future__ import annotations

import bisect
from typing import Any

import torch
import triton

from ftengine.formats.format import ExpertLayout, Format, padded, panels
from ftengine.kernels.triton.expert_dots import DOT_FORMATS
from ftengine.kernels.triton.expert_tiles import geometry
from ftengine.kernels.triton.experts import check_layout
from ftengine.kernels.triton.grouped_tiles import add_routes, down_tiles, gate_up_tiles, spread_columns
from ftengine.kernels.triton.launch import multiprocessors
from ftengine.kernels.triton.portable import EXACT_DOT, large_shared_memory
from ftengine.kernels.triton.route_order import RouteOrder, block_of

RESULT_BYTES = 64 << 20  # of the routes' results that exist at a time: the hidden size is gone through in parts
PROGRAMS = 4  # a multiprocessor
FAST = {"HEIGHT": 128, "WIDTH": 32, "num_warps": 8, "num_stages": 2}
SMALL = {"HEIGHT": 64, "WIDTH": 16, "num_warps": 4, "num_stages": 2}  # fits the shared memory of smaller GPUs
SLOW = {"HEIGHT": 32, "WIDTH": 16, "num_warps": 4, "num_stages": 2}


def experts_grouped(
    layout: ExpertLayout,
    blocks: torch.Tensor,
    order: RouteOrder,
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out[t] += sum over i of weights[t, i] * expert(slots[t, i])(x[t]), without routes whose slot is -1.

    blocks: as for `experts_decode`. order: of slots [T, k]. x: [T, H], float32 or bfloat16. weights: float32 [T, k],
    contiguous. out: float32 [T, H], contiguous. No synchronization with the host; no two runs differ in a bit.

    Raises what `experts_decode` raises.
    """
    check_layout(layout, blocks)
    tokens, top_k = order.tokens, order.top_k
    if x.shape != (tokens, layout.hidden) or out.shape != x.shape or weights.shape != (tokens, top_k):
        raise ValueError(f"x {list(x.shape)}, weights {list(weights.shape)}, out {list(out.shape)} of {tokens} tokens")
    if tokens == 0 or top_k == 0:
        return
    routes = tokens * top_k
    gate_up = _matrix(layout.gate_up, layout.hidden, 0, blocks, x.dtype)
    down = _matrix(layout.down, layout.intermediate, layout.down_offset, blocks, x.dtype)
    programs = PROGRAMS * multiprocessors(x.device)

    lifted = torch.empty(tokens, padded(layout.hidden), dtype=x.dtype, device=x.device)
    _spread(x, lifted, gate_up)
    act = _rows_with_zeros_behind(routes, layout.intermediate, x)
    gate_up_tiles[(programs,)](
        lifted, blocks, order.routes, order.slots, order.first, order.count, act, routes, programs,
        TOP_K=top_k, INTERMEDIATE=layout.intermediate, PANELS=2 * panels(layout.intermediate),
        GROUPS=triton.cdiv(32 * panels(layout.intermediate), gate_up["HEIGHT"]), BLOCK=order.block,
        DOWN_WORD=down["WORD"], DOWN_WORDS=down["WORDS"], DOWN_CODES=down["CODES"], **gate_up,
    )  # fmt: skip
    part = _columns_at_a_time(routes, layout.hidden, x.dtype)
    results = torch.empty(routes, part, dtype=x.dtype, device=x.device)
    for first in range(0, layout.hidden, part):
        down_tiles[(programs,)](
            act, blocks, order.routes, order.slots, order.first, order.count, results, routes, programs, first,
            min(part, layout.hidden - first), PART=part, GROUPS=triton.cdiv(part, down["HEIGHT"]), BLOCK=order.block,
            **down,
        )  # fmt: skip
        block = min(1024, triton.next_power_of_2(part))
        add_routes[(tokens, triton.cdiv(part, block))](
            results, order.skipped, weights, out, first, layout.hidden,
            TOP_K=top_k, PART=part, BLOCK=block,
        )  # fmt: skip


def _rows_with_zeros_behind(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    make = torch.empty if padded(columns) == columns else torch.zeros
    return make(rows, padded(columns), dtype=like.dtype, device=like.device)


def longest_of_each_kind(top_k: int, hidden: int, dtype: torch.dtype, tokens: int) -> list[int]:
    """Lengths of up to `tokens` tokens: each the longest one of those whose kernels are cut alike, so that compiling
    for these is compiling for all."""

    def kind(length: int) -> tuple[int, int]:
        return block_of(length * top_k), _columns_at_a_time(length * top_k, hidden, dtype)

    found, left = [], tokens
    while left > 0:
        found.append(left)
        left = bisect.bisect_left(range(1, left), True, key=lambda length: kind(length) == kind(left))
    return found


def _columns_at_a_time(routes: int, hidden: int, dtype: torch.dtype) -> int:
    """What a tile is high, times a power of two: few sizes to compile for."""
    fit = RESULT_BYTES // (dtype.itemsize * routes) // FAST["HEIGHT"]
    return min(FAST["HEIGHT"] << max(fit.bit_length() - 1, 0), panels(hidden) * 16)


def _matrix(format: Format, columns: int, base: int, blocks: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    fast = dtype == torch.bfloat16 and format in DOT_FORMATS
    return {
        **geometry(format, columns, base, blocks.shape[1]),
        **(SLOW if not fast else FAST if large_shared_memory(blocks.device) else SMALL),
        "SHORT": format in DOT_FORMATS,
        "EXACT": EXACT_DOT or not fast,
    }


def _spread(x: torch.Tensor, out: torch.Tensor, matrix: dict[str, Any]) -> None:
    columns = out.shape[1]
    block = min(1024, triton.next_power_of_2(columns))
    spread_columns[(len(x), triton.cdiv(columns, block))](
        x, x.stride(0), out, COLUMNS=x.shape[1], WORD=matrix["WORD"], WORDS=matrix["WORDS"], CODES=matrix["CODES"],
        BLOCK=block,
    )  # fmt: skip
