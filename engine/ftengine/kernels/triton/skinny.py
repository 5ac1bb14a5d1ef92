"""Two to sixteen tokens through a matrix, on tensor cores: Y = W X^T with 8 or 16 columns.

Bound by the bytes of W. A program owns BLOCK_N rows; its SPLIT groups of warps each take a share of the columns, and
their sums meet in the program itself, in a fixed order. Loads are asynchronous copies, several stages deep.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from ftengine.formats.format import Format
from ftengine.formats.matrix import QuantMatrix
from ftengine.kernels.triton.arguments import needs_float32, product_arguments, result_arguments, weight_arguments
from ftengine.kernels.triton.decode import group_scales, nibbles, numbers
from ftengine.kernels.triton.launch import PDL, launch_options, start_next, wait_for_previous
from ftengine.kernels.triton.tuning import Config, choose

FEW_ROWS = 4096  # of a matrix that gives each multiprocessor one program or two


def skinny(
    part: QuantMatrix,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    add: bool,
) -> None:
    """`linear` for one part, act rows and 1 to 16 tokens."""
    key = (part.format.name, part.rows, part.columns, _width(x), str(x.dtype), add)
    run = partial(launch_skinny, part, x, bias=bias, scale=scale, add=add)
    config = choose(
        "skinny", key, skinny_candidates(part.format, part.rows, x.dtype), lambda one: run(torch.empty_like(out), one)
    )
    run(out, config)


def skinny_candidates(kind: Format, rows: int, act: torch.dtype) -> list[Config]:
    """Rows a program, shares of the columns, columns of a step in each share, stages, warps, and whether to prefetch
    while the previous kernel still runs; the best guess first."""
    if needs_float32(kind, act):
        shapes = [(16, 4, 32, 3, 4, True)]
    elif kind.bits == 16:
        shapes = [(16, 4, 64, 5, 4, True), (16, 4, 64, 5, 4, False), (32, 4, 64, 4, 4, True), (16, 8, 64, 5, 8, True)]
    else:
        shapes = [(16, 4, 128, 4, 4, True), (16, 4, 128, 4, 4, False), (16, 8, 128, 4, 8, True)]
    if rows <= FEW_ROWS and len(shapes) > 1:
        shapes.insert(0, shapes.pop())  # more warps a program, for there are few programs
    names = ("BLOCK_N", "SPLIT", "BLOCK_K", "STAGES", "num_warps", "PREFETCH")
    return [dict(zip(names, shape, strict=True)) for shape in shapes]


def launch_skinny(
    part: QuantMatrix,
    x: torch.Tensor,
    out: torch.Tensor,
    config: Config,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    add: bool = False,
) -> None:
    skinny_kernel[(triton.cdiv(part.rows, config["BLOCK_N"]),)](
        x=x,
        tokens=x.shape[0],
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        TOKENS=_width(x),
        PDL=PDL,
        **weight_arguments(part),
        **result_arguments(out, bias, scale, add),
        **product_arguments(part.format, x.dtype),
        **config,
        **launch_options(),
    )


def _width(x: torch.Tensor) -> int:
    """Columns of the tensor cores' tile that holds the tokens."""
    return 8 if x.shape[0] <= 8 else 16


@triton.jit
def load_tile(
    codes,
    scales,
    row,  # int64 [N]
    inside,  # bool [N]
    column,  # int32 [S], the first of each share
    stride,
    scale_stride,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Numbers [S, N, BLOCK_K] as float32, times the scales of their groups."""
    SPLIT: tl.constexpr = column.shape[0]
    BLOCK_N: tl.constexpr = row.shape[0]
    at = (column // PACKED)[:, None, None] + tl.arange(0, BLOCK_K // PACKED)[None, None, :]
    mask = inside[None, :, None] & (at < (K + PACKED - 1) // PACKED)
    found = tl.load(codes + row[None, :, None] * stride + at, mask=mask, other=0)
    if PACKED == 2:
        even, odd = nibbles(found, FORMAT)
        values = tl.reshape(tl.join(even, odd), (SPLIT, BLOCK_N, BLOCK_K))
    else:
        values = numbers(found, FORMAT)
    if GROUP > 0:
        group = (column // GROUP)[:, None, None] + tl.arange(0, BLOCK_K // GROUP)[None, None, :]
        mask = inside[None, :, None] & (group < (K + GROUP - 1) // GROUP)
        stored = tl.load(scales + row[None, :, None] * scale_stride + group, mask=mask, other=0)
        grouped = tl.reshape(values, (SPLIT, BLOCK_N, BLOCK_K // GROUP, GROUP))
        scaled = grouped * group_scales(stored, FORMAT)[:, :, :, None]
        values = tl.reshape(scaled, (SPLIT, BLOCK_N, BLOCK_K))
    return values


@triton.jit
def prefetch_rows(codes, row, stride, K: tl.constexpr, PACKED: tl.constexpr):
    """Asks for whole rows, int32 [N], to be brought to the L2 cache."""
    SIZE: tl.constexpr = codes.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = ((K + PACKED - 1) // PACKED * SIZE + 127) // 128
    line = tl.minimum(tl.arange(0, triton.next_power_of_2(LINES)), LINES - 1)
    address = (codes + row.to(tl.int64) * stride)[:, None].to(tl.int64) + line[None, :] * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def skinny_kernel(
    x,  # act [tokens, K]
    codes,
    scales,
    row_scales,
    bias,  # float32 [rows]
    gate,  # float32 [tokens]
    out,  # float32 [tokens, rows]
    rows,
    tokens,
    x_stride,
    stride,
    scale_stride,
    out_stride,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    SHARE: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < rows
    token = tl.arange(0, TOKENS)
    present = token < tokens
    share = tl.arange(0, SPLIT) * SHARE
    sums = tl.zeros((SPLIT, BLOCK_N, TOKENS), tl.float32)
    if PREFETCH and PDL:
        prefetch_rows(codes, tl.minimum(row, rows - 1), stride, K, PACKED)
    wait_for_previous(PDL)
    start_next(PDL)
    for step in tl.range(0, SHARE, BLOCK_K, num_stages=STAGES):
        first = share + step
        weight = load_tile(
            codes, scales, row.to(tl.int64), inside, first, stride, scale_stride, K, FORMAT, PACKED, GROUP, BLOCK_K
        )
        column = first[:, None, None] + tl.arange(0, BLOCK_K)[None, :, None]
        vectors = tl.load(
            x + token[None, None, :] * x_stride + column, mask=present[None, None, :] & (column < K), other=0
        )
        if FORMAT == "fp8-block":
            at = (tl.program_id(0) * BLOCK_N // 128) * scale_stride + first // 128
            block = tl.load(scales + at, mask=first < K, other=0.0)
            part = tl.dot(weight.to(OPERAND), vectors.to(OPERAND), input_precision=PRECISION)
            sums += part * block[:, None, None]
        else:
            sums = tl.dot(weight.to(OPERAND), vectors.to(OPERAND), sums, input_precision=PRECISION)
    total = tl.sum(sums, 0)
    if ROW_SCALE:
        total = total * tl.load(row_scales + row, mask=inside, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0)[:, None]
    if GATE:
        total = total * tl.load(gate + token, mask=present, other=0.0)[None, :]
    at = out + token[None, :] * out_stride + row[:, None]
    mask = present[None, :] & inside[:, None]
    if ADD:
        total += tl.load(at, mask=mask, other=0.0)
    tl.store(at, total, mask=mask)
