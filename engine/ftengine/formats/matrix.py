"""Weight matrices with their scales: in the natural order that checkpoints have, and in the order that kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftengine.formats.format import Format, ScaleKind


@dataclass(frozen=True)
class QuantMatrix:
    """A matrix [rows, columns] in natural order, on the CPU.

    codes: F32/F16/BF16: [rows, columns] of that dtype. FP8, Q8_0: uint8 / int8 [rows, columns]. 4 bit: uint8
    [rows, ceil(columns / 2)], the even column in the low nibble.
    scales: FP8: float32 [rows] (a per-tensor scale repeated); FP8_BLOCK: float32 [ceil(rows/128), ceil(columns/128)];
    NVFP4: uint8 (e4m3 bytes) [rows, ceil(columns / 16)]; MXFP4: uint8 (e8m0 bytes) [rows, ceil(columns / 32)]; Q8_0,
    Q4_0: float16 [rows, ceil(columns / 32)]; else None.
    row_scales: NVFP4 only, float32 [rows]: the tensor's second scale (weight_scale_2), repeated.
    """

    format: Format
    rows: int
    columns: int
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None

    def part(self, first: int, last: int) -> QuantMatrix:
        """Rows [first, last) as views. Raises ValueError where that would cut a block of scales."""
        scales, row_scales = self.scales, self.row_scales
        if self.format.scales is ScaleKind.BLOCK128:
            if first % 128 or (last % 128 and last != self.rows):
                raise ValueError(f"rows {first} to {last} do not end where blocks of 128 do")
            first_block, last_block = first // 128, -(-last // 128)
            scales = scales[first_block:last_block] if scales is not None else None
        elif scales is not None:
            scales = scales[first:last]
        row_scales = row_scales[first:last] if row_scales is not None else None
        return QuantMatrix(self.format, last - first, self.columns, self.codes[first:last], scales, row_scales)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [rows, columns] in panel order. data: uint8 [format.matrix_bytes(rows, columns)], 64-byte aligned."""

    format: Format
    rows: int
    columns: int
    data: torch.Tensor
