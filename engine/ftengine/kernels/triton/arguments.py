"""What kernels that multiply by a matrix in natural order are told about it, and about what becomes of the product."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from ftengine.formats.format import Codes, Format, ScaleKind
from ftengine.formats.matrix import QuantMatrix
from ftengine.kernels.triton.decode import codes_per_element, group_of
from ftengine.kernels.triton.launch import INTERPRETED

TRITON_TYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def weight_arguments(part: QuantMatrix, *, words: bool = False) -> dict[str, Any]:
    """codes, scales, row_scales, strides and the constants that say how to read them.

    words: codes below 16 bits as int32, where the rows' length allows it.
    """
    codes, packed = part.codes, codes_per_element(part.format)
    if words and part.format.bits < 16 and codes.shape[1] % 4 == 0 and codes.stride(0) % 4 == 0:
        codes, packed = codes.view(torch.int32), 4 * packed
    return {
        "codes": codes,
        "scales": part.scales,
        "row_scales": row_scales_of(part),
        "rows": part.rows,
        "stride": codes.stride(0),
        "scale_stride": 0 if part.scales is None else part.scales.stride(0),
        "K": part.columns,
        "FORMAT": part.format.name,
        "PACKED": packed,
        "GROUP": group_of(part.format),
        "ROW_SCALE": row_scales_of(part) is not None,
    }


def row_scales_of(part: QuantMatrix) -> torch.Tensor | None:
    """float32 [rows], where the format has one scale a row."""
    return part.scales if part.format.scales is ScaleKind.ROW else part.row_scales


def result_arguments(
    out: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None, add: bool
) -> dict[str, Any]:
    """out (+)= (product + bias) * scale."""
    return {
        "out": out,
        "bias": bias,
        "gate": scale,
        "BIAS": bias is not None,
        "GATE": scale is not None,
        "ADD": add,
    }


def needs_float32(kind: Format, act: torch.dtype) -> bool:
    """Whether a product of such a weight and such an activation is exact only if both are taken as float32."""
    return act == torch.float32 or kind.codes in (Codes.FLOAT32, Codes.INT8, Codes.INT4)


def product_arguments(kind: Format, act: torch.dtype) -> dict[str, Any]:
    """The type and precision of tl.dot in which each product is exact. Float16's 11 bits, bfloat16's range fit TF32."""
    if needs_float32(kind, act):
        return {"OPERAND": tl.float32, "PRECISION": "ieee"}
    if kind.codes is Codes.FLOAT16:
        return {"OPERAND": tl.float32, "PRECISION": "tf32"}
    # The interpreter would multiply bfloat16's bit patterns; the values are the same in float32.
    return {"OPERAND": tl.float32 if INTERPRETED else tl.bfloat16, "PRECISION": "ieee"}
