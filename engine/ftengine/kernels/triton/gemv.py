"""One token through a matrix: y = W x, with the norm before and the bias, the gate and the sum after it.

Bound by the bytes of W. A program holds x in registers and goes over tiles of BLOCK_N whole rows, the next tile's
loads under way while it sums up the present one; its first two are asked for before the previous kernel is done.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from ftengine.formats.format import Format
from ftengine.formats.matrix import QuantMatrix
from ftengine.kernels.triton.arguments import TRITON_TYPE, result_arguments, weight_arguments
from ftengine.kernels.triton.dot_rows import dot_rows
from ftengine.kernels.triton.launch import PDL, launch_options, multiprocessors, start_next, wait_for_previous
from ftengine.kernels.triton.portable import bound
from ftengine.kernels.triton.tuning import Config, choose

MAX_COLUMNS = 1 << 14  # that one program holds in registers


def gemv(
    part: QuantMatrix,
    x: torch.Tensor,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    act: torch.dtype,
    normalized: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    add: bool,
) -> None:
    """`linear` for one part and T = 1, columns <= MAX_COLUMNS."""
    key = (part.format.name, part.rows, part.columns, norm is not None, add)
    run = partial(launch_gemv, part, x, norm=norm, act=act, normalized=normalized, bias=bias, scale=scale, add=add)
    config = choose(
        "gemv", key, gemv_candidates(part.format, part.columns), lambda one: run(torch.empty_like(out), one)
    )
    run(out, config)


def gemv_candidates(kind: Format, columns: int) -> list[Config]:
    """Rows a tile, programs a multiprocessor, warps; the best guess first.

    Two tiles a program are in flight. By Little's law some 30 KB a multiprocessor hide an H200's memory latency; these
    have 48 to 128 KB, as many as the registers hold. Codes of 4 bits take more registers to unpack.
    """
    warps = max(4, triton.next_power_of_2(columns) // 1024)
    row_bytes = max(columns * kind.bits // 8, 1)
    fitting = max((64 if kind.bits < 8 else 128) * 32 * warps // row_bytes, 1)
    rows = min(1 << (fitting.bit_length() - 1), 16)
    half = max(rows // 2, 1)
    programs = max(16 // warps, 1)  # with at most 128 registers a thread
    if columns > 2048:  # x itself takes many registers
        shapes = [(half, programs, warps), (2 * rows, programs // 2, 2 * warps), (rows, programs * 3 // 4, warps)]
    elif kind.bits == 8:
        shapes = [(half, programs * 5 // 4, warps), (rows, programs * 3 // 4, warps), (rows, programs // 2, 2 * warps)]
    else:
        shapes = [(rows, programs, warps), (half, programs * 5 // 4, warps), (2 * rows, programs // 2, 2 * warps)]
    return [{"BLOCK_N": n, "PROGRAMS": max(count, 1), "num_warps": w} for n, count, w in shapes]


def launch_gemv(
    part: QuantMatrix,
    x: torch.Tensor,
    out: torch.Tensor,
    config: Config,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    act: torch.dtype = torch.bfloat16,
    normalized: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    add: bool = False,
) -> None:
    config = dict(config)
    tiles = triton.cdiv(part.rows, config["BLOCK_N"])
    programs = min(tiles, config.pop("PROGRAMS") * multiprocessors(x.device))
    weight, epsilon = (None, 0.0) if norm is None else norm
    gemv_kernel[(programs,)](
        x=x,
        norm_weight=weight,
        normalized=normalized,
        epsilon=epsilon,
        NORM=norm is not None,
        KEEP=normalized is not None,
        ACT=TRITON_TYPE[act],
        BLOCK_K=max(triton.next_power_of_2(part.columns), 128),
        PDL=PDL,
        **weight_arguments(part, words=True),
        **result_arguments(out, bias, scale, add),
        **config,
        **launch_options(),
    )


@triton.jit
def load_rows(
    codes,
    scales,
    tile,
    rows,
    stride,
    scale_stride,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,  # codes an element
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Codes [BLOCK_N, BLOCK_K / PACKED] of a tile, and the scales of its groups or blocks."""
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < rows
    row = row.to(tl.int64)
    column = tl.arange(0, BLOCK_K // PACKED)
    mask = inside[:, None] & (column < (K + PACKED - 1) // PACKED)[None, :]
    found = tl.load(codes + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
    if GROUP > 0:
        group = tl.arange(0, BLOCK_K // GROUP)
        mask = inside[:, None] & (group < (K + GROUP - 1) // GROUP)[None, :]
        scale = tl.load(scales + row[:, None] * scale_stride + group[None, :], mask=mask, other=0.0)
    elif FORMAT == "fp8-block":
        block = tl.arange(0, BLOCK_K // 128)
        at = (tile * BLOCK_N // 128) * scale_stride + block
        scale = tl.load(scales + at, mask=(block < (K + 127) // 128) & (tile * BLOCK_N < rows), other=0.0)
    else:
        scale = 0.0
    return found, scale


@triton.jit
def load_x(
    x,
    norm_weight,
    normalized,
    epsilon,
    K: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x [K] as float32 [BLOCK_K]; with NORM normalized and rounded to ACT, with KEEP written by the first program."""
    column = tl.arange(0, BLOCK_K)
    mask = column < K
    values = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(norm_weight + column, mask=mask, other=0.0)
        values = values * tl.math.rsqrt(tl.sum(values * values, 0) / K + epsilon) * weight
        rounded = values.to(ACT)
        if KEEP and tl.program_id(0) == 0:
            tl.store(normalized + column, rounded, mask=mask)
        values = rounded.to(tl.float32)
    return values


@triton.jit
def gemv_kernel(
    x,  # [K] act, or float32 with NORM
    norm_weight,  # float32 [K]
    normalized,  # act [K]
    codes,
    scales,
    row_scales,
    bias,  # float32 [rows]
    gate,  # float32 [1]
    out,  # float32 [rows]
    rows,
    stride,
    scale_stride,
    epsilon,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles = tl.cdiv(rows, BLOCK_N)
    now, now_scale = load_rows(
        codes, scales, tile, rows, stride, scale_stride, K, FORMAT, PACKED, GROUP, BLOCK_N, BLOCK_K
    )
    then, then_scale = load_rows(
        codes, scales, tile + programs, rows, stride, scale_stride, K, FORMAT, PACKED, GROUP, BLOCK_N, BLOCK_K
    )
    wait_for_previous(PDL)
    start_next(PDL)
    vector = load_x(x, norm_weight, normalized, epsilon, K, NORM, KEEP, ACT, BLOCK_K)
    factor = tl.load(gate) if GATE else 1.0
    for tile in range(bound(tl.program_id(0)), bound(tiles), bound(programs)):
        row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = row < rows
        before = tl.load(out + row, mask=inside, other=0.0) if ADD else 0.0
        row_scale = tl.load(row_scales + row, mask=inside, other=0.0) if ROW_SCALE else 1.0
        offset = tl.load(bias + row, mask=inside, other=0.0) if BIAS else 0.0
        sums = dot_rows(now, now_scale, vector, FORMAT, PACKED, GROUP) * row_scale
        tl.store(out + row, before + (sums + offset) * factor, mask=inside)
        now, now_scale = then, then_scale
        then, then_scale = load_rows(
            codes, scales, tile + 2 * programs, rows, stride, scale_stride, K, FORMAT, PACKED, GROUP, BLOCK_N, BLOCK_K
        )
