"""From numbers to a format's codes and block scales: nearest rounding, ties to even.

Scales are the formats' own: FP8 amax / 448 a row or a 128 x 128 block; NVFP4 as ModelOpt has it, a float32 scale
amax / (6 * 448) for the matrix and an e4m3 one for 16 columns; MXFP4 by OCP MX v1.0, section 6.3, a power of two for 32
columns; Q8_0 and Q4_0 as ggml computes them (ggml-quants.c), whose codes round halves away from zero.
"""

from __future__ import annotations

import torch

from ftengine.errors import CheckpointError
from ftengine.formats.format import FP8, FP8_BLOCK, MXFP4, NVFP4, Codes, Format, ScaleKind
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.native import NATIVE, threads_for
from ftengine.formats.reference import quantize_rows
from ftengine.formats.tables import E2M1_MAX, E4M3_MAX, SMALLEST_SCALE

if NATIVE:
    from ftengine import _native

PLAIN = {Codes.FLOAT32: torch.float32, Codes.FLOAT16: torch.float16, Codes.BFLOAT16: torch.bfloat16}
IN_NATIVE = (FP8, FP8_BLOCK, NVFP4, MXFP4)
ROW_BLOCK = 1024  # a multiple of 128; bounds the float32 copy of a matrix that comes in 16 bits


def quantize(values: torch.Tensor, target: Format, name: str = "a matrix", *, threads: int = 0) -> QuantMatrix:
    """values: [rows, columns] of a floating dtype. A last group of columns that is not full is filled up with zeros.

    threads: at most so many; 0 for torch's own setting where the matrix is worth it.

    Raises CheckpointError, with `name`, where a format with scales is to hold NaN or infinity, or one whose numbers or
    scales are float16 is to hold more than those can.
    """
    rows, columns = values.shape
    if target.scales is ScaleKind.NONE:
        codes = values.to(PLAIN[target.codes]).contiguous()
        if target.codes is Codes.FLOAT16 and not torch.equal(codes.isinf(), values.isinf()):
            raise CheckpointError(f"{name} holds numbers too large for {target.name}")
        return QuantMatrix(target, rows, columns, codes)
    second = _second_scale(values, target, name)
    parts = torch.split(values, ROW_BLOCK)
    blocks = [_quantize_rows(part.float().contiguous(), target, second, threads) for part in parts]
    codes, scales = (torch.cat(found) if len(found) > 1 else found[0] for found in zip(*blocks, strict=True))
    if scales.dtype == torch.float16 and not scales.isfinite().all():
        raise CheckpointError(f"{name} holds numbers too large for {target.name}")
    row_scales = second.expand(rows).contiguous() if target.scales is ScaleKind.GROUP16 else None
    return QuantMatrix(target, rows, columns, codes, scales, row_scales)


def _second_scale(values: torch.Tensor, target: Format, name: str) -> torch.Tensor:
    """amax / (6 * 448), found while all numbers are looked at for what is not finite."""
    if not values.numel():
        return torch.tensor(SMALLEST_SCALE)
    largest = torch.stack(torch.aminmax(values)).float().abs().amax()  # NaN if there is one
    if not largest.isfinite():
        raise CheckpointError(f"{name} holds NaN or infinity, which {target.name} cannot hold")
    return (largest / (E2M1_MAX * E4M3_MAX)).clamp(min=SMALLEST_SCALE)


def _quantize_rows(
    values: torch.Tensor, target: Format, second: torch.Tensor, threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = values.shape
    if not NATIVE or target not in IN_NATIVE or not values.numel():
        return quantize_rows(values, target, second)
    codes = torch.empty(rows, -(-columns // 2) if target.bits == 4 else columns, dtype=torch.uint8)
    if target is FP8:
        scales = torch.empty(rows)
    elif target is FP8_BLOCK:
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
    else:
        scales = torch.empty(rows, -(-columns // (16 if target is NVFP4 else 32)), dtype=torch.uint8)
    count = threads or threads_for(values.nbytes)
    _native.quantize(target.number, values, second.item(), codes, scales, count)
    return codes, scales
