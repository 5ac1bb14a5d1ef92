"""Rows of a matrix in plain numbers: all of a range for a matrix product, or those that token ids name."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftengine.formats.matrix import QuantMatrix
from ftengine.kernels.triton.arguments import weight_arguments
from ftengine.kernels.triton.decode import group_scales, nibbles, numbers
from ftengine.kernels.triton.launch import PDL, launch_options, wait_for_previous

TILE = 1024  # columns a program
BLOCK_ROWS = 8  # rows a program, where they follow each other


def dequantize_rows(matrix: QuantMatrix, first: int, out: torch.Tensor, *, row_scales: bool = True) -> None:
    """out [n, columns] = rows first .. first + n of a matrix on the device, rounded to out's dtype.

    row_scales: False leaves out a format's scale of a whole row, so that FP8 and NVFP4 are exact in bfloat16.
    """
    _launch(matrix, None, first, out, row_scales)


def embed(matrix: QuantMatrix, ids: torch.Tensor, out: torch.Tensor) -> None:
    """out float32 [T, H] = rows ids [T] (int32 or int64) of a matrix [vocabulary, H] on the device."""
    _launch(matrix, ids, 0, out, True)


def _launch(matrix: QuantMatrix, ids: torch.Tensor | None, first: int, out: torch.Tensor, row_scales: bool) -> None:
    if not len(out):
        return
    arguments = weight_arguments(matrix)
    arguments["ROW_SCALE"] &= row_scales
    count = 1 if ids is not None else BLOCK_ROWS
    grid = (triton.cdiv(len(out), count), triton.cdiv(matrix.columns, TILE))
    _rows[grid](
        ids=ids,
        first=first,
        count=len(out),
        out=out,
        out_stride=out.stride(0),
        IDS=ids is not None,
        COUNT=count,
        TILE=TILE,
        PDL=PDL,
        **arguments,
        **launch_options(),
    )


@triton.jit
def _rows(
    ids,
    first,
    count,  # rows of out
    codes,
    scales,
    row_scales,
    out,
    rows,
    stride,
    scale_stride,
    out_stride,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    IDS: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = index < count
    start = tl.program_id(1) * TILE
    wait_for_previous(PDL)
    row = tl.load(ids + index, mask=inside, other=0).to(tl.int64) if IDS else index + first
    at = start // PACKED + tl.arange(0, TILE // PACKED)
    present = inside[:, None] & (at < (K + PACKED - 1) // PACKED)[None, :]
    found = tl.load(codes + row[:, None] * stride + at[None, :], mask=present, other=0)
    if PACKED == 2:
        even, odd = nibbles(found, FORMAT)
        values = tl.reshape(tl.join(even, odd), (COUNT, TILE))
    else:
        values = numbers(found, FORMAT)
    column = start + tl.arange(0, TILE)
    mask = inside[:, None] & (column < K)[None, :]
    if GROUP > 0:
        stored = tl.load(scales + row[:, None] * scale_stride + (column // GROUP)[None, :], mask=mask, other=0)
        values *= group_scales(stored, FORMAT)
    elif FORMAT == "fp8-block":
        block = (row // 128 * scale_stride)[:, None] + (column // 128)[None, :]
        values *= tl.load(scales + block, mask=mask, other=0.0)
    if ROW_SCALE:
        values *= tl.load(row_scales + row, mask=inside, other=0.0)[:, None]
    tl.store(out + (index * out_stride)[:, None] + column[None, :], values.to(out.dtype.element_ty), mask=mask)
