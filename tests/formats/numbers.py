"""The formats' definitions once more, plainly and slowly: what the tests of this folder compare with."""

from __future__ import annotations

import math

import numpy as np
import torch

from ftengine.formats.format import Codes, Format, ScaleKind
from ftengine.formats.matrix import QuantMatrix

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def e4m3(byte: int) -> float:
    """OCP 8-bit floating point specification, 5.2: bias 7, no infinities, S.1111.111 is NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e8m0(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


E4M3_TABLE = np.array([e4m3(byte) for byte in range(256)], np.float32)
E8M0_TABLE = np.array([e8m0(byte) for byte in range(256)], np.float64).astype(np.float32)
STORED = {Codes.FLOAT32: torch.float32, Codes.FLOAT16: torch.float16, Codes.BFLOAT16: torch.bfloat16}


def random_matrix(kind: Format, rows: int, columns: int, seed: int = 0) -> QuantMatrix:
    """Any bytes whatever as codes and scales, NaN among them."""
    random = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    if kind.codes in STORED:
        codes = torch.randn(rows, columns, generator=random).to(STORED[kind.codes])
    elif kind.codes is Codes.INT8:
        codes = integers(-128, 128, rows, columns).to(torch.int8)
    else:
        codes = integers(0, 256, rows, -(-columns // 2) if kind.bits == 4 else columns).to(torch.uint8)
    scales = {
        ScaleKind.NONE: lambda: None,
        ScaleKind.ROW: lambda: torch.randn(rows, generator=random),
        ScaleKind.BLOCK128: lambda: torch.randn(-(-rows // 128), -(-columns // 128), generator=random),
        ScaleKind.GROUP16: lambda: integers(0, 256, rows, -(-columns // 16)).to(torch.uint8),
        ScaleKind.MX32: lambda: integers(0, 256, rows, -(-columns // 32)).to(torch.uint8),
        ScaleKind.HALF32: lambda: torch.randn(rows, -(-columns // 32), generator=random).half(),
    }[kind.scales]()
    row_scales = torch.randn(rows, generator=random) if kind.scales is ScaleKind.GROUP16 else None
    return QuantMatrix(kind, rows, columns, codes, scales, row_scales)


def code(matrix: QuantMatrix, row: int, column: int) -> int:
    """The element's bits: a nibble, a byte, or a float's bytes as a number."""
    stored = matrix.codes[row]
    if matrix.format.bits == 4:
        return int(stored[column // 2]) >> 4 * (column % 2) & 15
    width = matrix.format.bits // 8
    raw = stored.contiguous().view(torch.uint8)[column * width : (column + 1) * width]
    return int.from_bytes(bytes(raw.tolist()), "little")


def dequantized(matrix: QuantMatrix) -> np.ndarray:
    """float32 [rows, columns], element by element."""
    kind, scales = matrix.format, matrix.scales
    out = np.empty((matrix.rows, matrix.columns), np.float32)
    for r, c in np.ndindex(out.shape):
        number = np.float32(_number(matrix, r, c))
        if kind.scales is ScaleKind.ROW:
            number *= np.float32(scales[r])
        elif kind.scales is ScaleKind.BLOCK128:
            number *= np.float32(scales[r // 128, c // 128])
        elif kind.scales is ScaleKind.GROUP16:
            number = number * E4M3_TABLE[scales[r, c // 16]] * np.float32(matrix.row_scales[r])
        elif kind.scales is ScaleKind.MX32:
            number *= E8M0_TABLE[scales[r, c // 32]]
        elif kind.scales is ScaleKind.HALF32:
            number *= np.float32(scales[r, c // 32])
        out[r, c] = number
    return out


def _number(matrix: QuantMatrix, row: int, column: int) -> float:
    kind = matrix.format.codes
    if kind in STORED or kind is Codes.INT8:
        return float(matrix.codes[row, column])
    bits = code(matrix, row, column)
    if kind is Codes.E4M3:
        return float(E4M3_TABLE[bits])
    return E2M1[bits] if kind is Codes.E2M1 else float(bits - 8)


def assert_same(left: QuantMatrix, right: QuantMatrix) -> None:
    """Bit for bit, NaN included."""
    assert (left.format, left.rows, left.columns) == (right.format, right.rows, right.columns)
    for name in ("codes", "scales", "row_scales"):
        one, other = getattr(left, name), getattr(right, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype, name
            assert one.shape == other.shape, name
            assert torch.equal(_bytes(one), _bytes(other)), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
