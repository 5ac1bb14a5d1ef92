"""From codes and scales to numbers: what every kernel and every conversion is measured against."""

from __future__ import annotations

import torch

from ftengine.formats.format import Codes, ScaleKind
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.native import NATIVE, threads_for
from ftengine.formats.tables import e2m1_pairs, e4m3, e8m0, int4_pairs

if NATIVE:
    from ftengine import _native

ROW_BLOCK = 1024  # a multiple of 128; bounds the float32 copy of a matrix that is wanted in 16 bits


def dequantize(matrix: QuantMatrix, dtype: torch.dtype = torch.float32, *, threads: int = 0) -> torch.Tensor:
    """A new tensor [rows, columns]. Products are float32: code * scale, for NVFP4 (code * scale) * row scale.

    Codes that are NaN give NaN, and so do scales. `dtype` other than float32 is rounded to at the end.
    threads: at most so many; 0 for torch's own setting where the matrix is worth it.
    """
    out = torch.empty(matrix.rows, matrix.columns, dtype=dtype)
    for first in range(0, matrix.rows, ROW_BLOCK):
        last = min(first + ROW_BLOCK, matrix.rows)
        if NATIVE and matrix.format.scales is not ScaleKind.NONE and matrix.columns:
            block = out[first:last] if dtype == torch.float32 else torch.empty(last - first, matrix.columns)
            _native_rows(matrix.part(first, last), block, threads)
            if dtype != torch.float32:
                out[first:last] = block
        else:
            out[first:last] = dequantized_rows(matrix, first, last)
    return out


def _native_rows(part: QuantMatrix, out: torch.Tensor, threads: int) -> None:
    count = threads or threads_for(out.nbytes)
    number, rows, columns = part.format.number, part.rows, part.columns
    _native.dequantize(number, rows, columns, part.codes, part.scales, part.row_scales, out, count)


def dequantized_rows(matrix: QuantMatrix, first: int, last: int) -> torch.Tensor:
    """Rows [first, last) in float32, in plain torch, where the matrix lies: what csrc/quantize.cpp is held equal to."""
    numbers = _numbers(matrix.format.codes, matrix.codes[first:last], matrix.columns)
    kind, scales = matrix.format.scales, matrix.scales
    if kind is ScaleKind.NONE:
        return numbers
    assert scales is not None
    if kind is ScaleKind.ROW:
        return numbers * scales[first:last, None]
    if kind is ScaleKind.BLOCK128:
        blocks = torch.arange(first, last) // 128
        return numbers * _spread(scales[blocks], 128, matrix.columns)
    part = scales[first:last]
    if kind is ScaleKind.GROUP16:
        assert matrix.row_scales is not None
        return numbers * _spread(e4m3(part), 16, matrix.columns) * matrix.row_scales[first:last, None]
    return numbers * _spread(e8m0(part) if kind is ScaleKind.MX32 else part.float(), 32, matrix.columns)


def _numbers(kind: Codes, codes: torch.Tensor, columns: int) -> torch.Tensor:
    if kind is Codes.E4M3:
        return e4m3(codes)
    if kind in (Codes.E2M1, Codes.INT4):
        pairs = e2m1_pairs() if kind is Codes.E2M1 else int4_pairs()
        return pairs.to(codes.device)[codes.int()].flatten(1)[:, :columns]
    return codes.float()


def _spread(scales: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    return scales.repeat_interleave(width, dim=1)[:, :columns]
