"""Matrices applied to token rows on the GPU: up to DECODE_TOKENS rows by kernels that read each weight once, more of
them by torch's matrix product."""

from __future__ import annotations

import torch

from ftengine.formats.format import BF16, F32
from ftengine.formats.matrix import QuantMatrix
from ftengine.kernels.triton.arguments import row_scales_of
from ftengine.kernels.triton.buffers import DECODE_TOKENS
from ftengine.kernels.triton.dequantize import dequantize_rows, embed
from ftengine.kernels.triton.gemv import MAX_COLUMNS, gemv
from ftengine.kernels.triton.norms import rms_norm, swiglu_act
from ftengine.kernels.triton.skinny import skinny
from ftengine.kernels.triton.upload import DeviceSwiGlu, stack, upload, upload_swiglu

__all__ = [
    "WORKSPACE_BYTES",
    "DeviceSwiGlu",
    "embed",
    "linear",
    "linear_large",
    "rms_norm",
    "stack",
    "swiglu_act",
    "upload",
    "upload_swiglu",
]

WORKSPACE_BYTES = 64 << 20  # the most that `linear_large` holds of a dequantized matrix at a time


def linear(
    parts: tuple[QuantMatrix, ...],
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    act: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    add: bool = False,
    normalized: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """out [T, N] = (parts @ x + bias) * scale, or += with `add`. T <= DECODE_TOKENS; fixed shapes, to be captured.

    parts: [n_i, K] on the device, one below the other, N rows together; `stack` joins those of one format, which saves
    launches. x: act [T, K], or with norm = (weight float32 [K], epsilon) the float32 residual, normalized and rounded
    to `act` first; `normalized`, act [T, K], receives that. out: float32, rows of any stride; bias: float32 [N];
    scale: float32 [T]. Sums are float32 and their order is fixed: equal inputs give equal bits.
    """
    tokens, columns = x.shape
    if tokens > DECODE_TOKENS:
        raise ValueError(f"linear takes {DECODE_TOKENS} rows, linear_large takes {tokens}")
    single = tokens == 1 and columns <= MAX_COLUMNS
    if norm is not None and not single:
        rows = torch.empty(x.shape, dtype=act, device=x.device) if normalized is None else normalized
        rms_norm(x, norm[0], norm[1], rows)
        x, norm = rows, None
    first = 0
    for part in parts if tokens else ():
        target = out[:, first : first + part.rows]
        addend = None if bias is None else bias[first : first + part.rows]
        if single:
            gemv(part, x, target, norm, act, normalized if first == 0 else None, addend, scale, add)
        else:
            skinny(part, x, target, addend, scale, add)
        first += part.rows


def linear_large(parts: tuple[QuantMatrix, ...], x: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x act [T, K] -> float32 [T, N], for any T. A matrix with scales is dequantized WORKSPACE_BYTES at a time.

    Products are exact and sums float32 in float32 (without TF32), and for bfloat16 rows with BF16, FP8, NVFP4 and MXFP4
    weights. F32 weights make the rows float32. Weights of the other formats are rounded to bfloat16.
    """
    out = x.new_empty(x.shape[0], sum(part.rows for part in parts), dtype=torch.float32)
    first = 0
    for part in parts:
        _large(part, x, out[:, first : first + part.rows])
        first += part.rows
    return out if bias is None else out.add_(bias)


def _large(part: QuantMatrix, x: torch.Tensor, out: torch.Tensor) -> None:
    dtype = torch.float32 if part.format is F32 else x.dtype
    x = x.to(dtype)
    if part.format in (BF16, F32) and part.codes.dtype == dtype:
        _product(x, part.codes, out)
        return
    block = max(WORKSPACE_BYTES // max(part.columns * dtype.itemsize, 1) // 128 * 128, 128)
    workspace = x.new_empty(min(block, part.rows), part.columns)
    for first in range(0, part.rows, block):
        target = out[:, first : first + block]
        weights = workspace[: target.shape[1]]
        dequantize_rows(part, first, weights, row_scales=False)
        _product(x, weights, target)
    scales = row_scales_of(part)
    if scales is not None:
        out.mul_(scales)


def _product(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    if x.is_cuda and x.dtype != torch.float32:
        product = torch.mm(x, weights.T, out_dtype=torch.float32, out=out if out.is_contiguous() else None)
        if product.data_ptr() != out.data_ptr():
            out.copy_(product)
    else:
        out.copy_(x.float() @ weights.float().T)
