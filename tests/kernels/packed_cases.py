"""What the tests of the packed kernels share: any bytes as a matrix, and float64 products with what they mean."""

from __future__ import annotations

import torch

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import FORMATS, Codes, Format, ScaleKind, padded
from ftengine.formats.matrix import QuantMatrix

ALL_FORMATS = tuple(FORMATS.values())
DTYPES = (torch.float32, torch.bfloat16)


def every_code(kind: Format, rows: int, columns: int) -> QuantMatrix:
    """All codes that a byte or nibble has, NaN included, and scales of ordinary size; values for 16 and 32 bits."""
    if kind.scales is ScaleKind.NONE:
        values = torch.randn(rows, columns) * 2.0 ** torch.randint(-20, 20, (rows, columns))
        stored = {Codes.FLOAT32: torch.float32, Codes.FLOAT16: torch.float16, Codes.BFLOAT16: torch.bfloat16}
        return QuantMatrix(kind, rows, columns, values.to(stored[kind.codes]))
    width = columns if kind.bits == 8 else columns // 2
    codes = torch.arange(rows * width).remainder(256).to(torch.uint8).view(rows, width)
    if kind.codes is Codes.INT8:
        codes = codes.view(torch.int8)
    scales, row_scales = _scales(kind, rows, columns)
    return QuantMatrix(kind, rows, columns, codes, scales, row_scales)


def _scales(kind: Format, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    groups = {ScaleKind.GROUP16: 16, ScaleKind.MX32: 32, ScaleKind.HALF32: 32}
    if kind.scales is ScaleKind.ROW:
        return torch.rand(rows) + 0.5, None
    if kind.scales is ScaleKind.BLOCK128:
        return torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5, None
    shape = (rows, columns // groups[kind.scales])
    count = shape[0] * shape[1]
    if kind.scales is ScaleKind.GROUP16:  # every e4m3 code, subnormal, negative and NaN
        return torch.arange(count).remainder(256).to(torch.uint8).view(shape), torch.rand(rows) + 0.5
    if kind.scales is ScaleKind.MX32:
        return torch.arange(100, 100 + count).remainder(40).add(107).to(torch.uint8).view(shape), None
    return (torch.randn(shape) * 2.0 ** torch.randint(-16, 4, shape)).half(), None  # subnormal ones among them


def activations(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, padded(columns)], zero from `columns` on."""
    x = torch.zeros(tokens, padded(columns), dtype=dtype)
    x[:, :columns] = torch.randn(tokens, columns)
    return x


def product(matrix: QuantMatrix, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 x w^T, and the same of magnitudes, which bounds what rounding float32 sums may do."""
    w, x64 = dequantize(matrix).double(), x[:, : matrix.columns].double()
    return x64 @ w.T, x64.abs() @ w.abs().T


def assert_close(found: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, tolerance: float = 2e-6) -> None:
    """NaN exactly where expected; else within `tolerance` of the sum of magnitudes."""
    assert torch.equal(found.isnan(), expected.isnan())
    error = (found.double() - expected).abs() / magnitude.clamp_min(1e-30)
    assert error.nan_to_num(0).max().item() <= tolerance
