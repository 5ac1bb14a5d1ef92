"""GGUF's blocks to numbers, and, where our formats hold the same codes and scales, to those without loss.

Blocks: ggml's ggml-common.h. Q4_0, Q8_0: a float16 scale, then 32 codes; in 4 bit, byte j has value j in its low nibble
and value j + 16 in its high one. MXFP4: an e8m0 byte, then e2m1 nibbles in the same order. NVFP4: four e4m3 bytes
without signs, then four groups of eight bytes, byte j with values j and j + 8 of its group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftengine.errors import CheckpointError
from ftengine.formats.format import MXFP4, NVFP4, Q8_0
from ftengine.formats.matrix import QuantMatrix
from ftengine.weights.gguf_kept import GROUP, KEPT
from ftengine.weights.gguf_types import GgufType

if TYPE_CHECKING:
    from numpy.typing import NDArray

E4M3_NAN = 0x7F  # which ggml reads as zero
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = ("I8", "I16", "I32", "I64")


def numbers(raw: NDArray[np.uint8], kind: GgufType) -> torch.Tensor:
    """raw: uint8 [rows, row bytes] -> [rows, columns] float32; F16 and BF16 as they are. Shares raw's memory if it can.

    Raises CheckpointError for a type that the gguf package cannot dequantize.
    """
    if kind.name in PLAIN:
        return torch.from_numpy(raw).view(PLAIN[kind.name])
    if kind.name == "F64":
        return torch.from_numpy(raw).view(torch.float64).float()
    from gguf import GGMLQuantizationType, dequantize

    try:
        if kind.name in INTEGERS:
            raise NotImplementedError
        values = dequantize(raw, GGMLQuantizationType(kind.number))
    except (NotImplementedError, ValueError):
        raise CheckpointError(f"tensors of the GGUF type {kind.name} cannot be read as numbers") from None
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def kept(raw: NDArray[np.uint8], kind: GgufType) -> QuantMatrix:
    """The same codes and scales in natural order; `kind` is one of KEPT. raw: uint8 [rows, row bytes]."""
    held, rows = KEPT[kind.name], raw.shape[0]
    columns = raw.shape[1] // kind.bytes * kind.elements
    if kind.is_plain:
        return QuantMatrix(held, rows, columns, numbers(raw, kind))
    blocks = raw.reshape(rows, columns // kind.elements, kind.bytes)
    scale_bytes = kind.bytes - kind.elements * held.bits // 8
    scale_part = np.ascontiguousarray(blocks[..., :scale_bytes]).reshape(rows, -1)
    codes = blocks[..., scale_bytes:]
    if held is Q8_0:
        whole = torch.from_numpy(np.ascontiguousarray(codes)).view(torch.int8).view(rows, columns)
    else:
        groups = codes.reshape(rows, columns // GROUP[kind.name], -1)
        whole = torch.from_numpy(_even_column_low(groups)).view(rows, columns // 2)
    if held is NVFP4:
        scale_part = np.where((scale_part & 0x7F) == E4M3_NAN, 0, scale_part & 0x7F).astype(np.uint8)
        return QuantMatrix(held, rows, columns, whole, torch.from_numpy(scale_part), torch.ones(rows))
    scales = torch.from_numpy(scale_part)
    return QuantMatrix(held, rows, columns, whole, scales if held is MXFP4 else scales.view(torch.float16))


def _even_column_low(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., n] bytes of columns (j, j + n) -> [..., n] bytes of columns (2j, 2j + 1), low nibble first."""
    pairs = np.ascontiguousarray(codes).view("<u2")  # bytes 2b and 2b + 1
    out = np.empty(codes.shape, np.uint8)
    half = pairs.shape[-1]
    out[..., :half] = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    out[..., half:] = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return out


def reorder_rows(matrix: QuantMatrix, order: NDArray[np.int64]) -> QuantMatrix:
    """Scales of rows move with them; second scales are the same for all rows."""
    index = torch.from_numpy(order)
    scales = None if matrix.scales is None else matrix.scales[index]
    return replace(matrix, codes=matrix.codes[index], scales=scales)


def reorder_columns(matrix: QuantMatrix, order: NDArray[np.int64], group: int) -> QuantMatrix:
    """`order` moves whole groups of `group` columns, each of which has its own scale (or none)."""
    index = torch.from_numpy(order[::group] // group)
    codes = matrix.codes.view(matrix.rows, len(index), -1)[:, index].reshape(matrix.rows, -1)
    scales = None if matrix.scales is None else matrix.scales[:, index].contiguous()
    return replace(matrix, codes=codes, scales=scales)
