"""The panel order in plain torch, codes and scales of all panels at once: what csrc/pack.cpp is held equal to."""

from __future__ import annotations

import torch

from ftengine.formats.format import PANEL_ROWS, Codes, Format, ScaleKind, padded, panels
from ftengine.formats.matrix import QuantMatrix

STORAGE = {Codes.FLOAT32: torch.float32, Codes.FLOAT16: torch.float16, Codes.BFLOAT16: torch.bfloat16}


def write_panels(matrix: QuantMatrix, out: torch.Tensor) -> None:
    """out: uint8 [panels, panel_bytes], rows of any stride."""
    codes_end = matrix.format.code_bytes(matrix.columns)
    scales_end = codes_end + matrix.format.scale_bytes(matrix.columns)
    out[:, :codes_end] = _panel_codes(matrix)
    if scales_end > codes_end:
        out[:, codes_end:scales_end] = _panel_scales(matrix)
    out[:, scales_end:] = 0


def read_panels(kind: Format, rows: int, columns: int, data: torch.Tensor) -> QuantMatrix:
    """data: uint8 [panels, panel_bytes], rows of any stride. In new tensors, natural order."""
    codes_end = kind.code_bytes(columns)
    codes = _natural_codes(kind, rows, columns, data[:, :codes_end].contiguous())
    scales_end = codes_end + kind.scale_bytes(columns)
    scales, row_scales = _natural_scales(kind, rows, columns, data[:, codes_end:scales_end].contiguous())
    return QuantMatrix(kind, rows, columns, codes, scales, row_scales)


def _panel_codes(matrix: QuantMatrix) -> torch.Tensor:
    """uint8 [panels, code_bytes]."""
    count, bits = panels(matrix.rows), matrix.format.bits
    codes = _filled(matrix.codes, count * PANEL_ROWS, padded(matrix.columns) // (2 if bits == 4 else 1))
    if bits >= 16:
        ordered = codes.view(count, PANEL_ROWS, -1, 2).transpose(1, 2)  # [panel][b][r][p]
    elif bits == 8:
        ordered = (
            codes.view(torch.uint8).view(count, PANEL_ROWS, -1, 2, 2).permute(0, 2, 1, 4, 3)
        )  # [panel][b][r][p][j]
    else:
        # A byte is columns 2i (low) and 2i + 1 (high): p picks the nibble, i = 4b + j.
        quads = codes.view(count, PANEL_ROWS, -1, 2, 2).transpose(1, 2)  # [panel][b][r][j / 2][j % 2]
        even, odd = quads[..., 0], quads[..., 1]
        low = (even & 15) | ((odd & 15) << 4)
        ordered = torch.stack((low, (even >> 4) | (odd & 0xF0)), dim=3)  # [panel][b][r][p][j / 2]
    return ordered.contiguous().view(count, -1).view(torch.uint8)


def _natural_codes(kind: Format, rows: int, columns: int, data: torch.Tensor) -> torch.Tensor:
    count = panels(rows)
    if kind.bits >= 16:
        ordered = data.view(STORAGE[kind.codes]).view(count, -1, PANEL_ROWS, 2).transpose(1, 2)
    elif kind.bits == 8:
        ordered = data.view(count, -1, PANEL_ROWS, 2, 2).permute(0, 2, 1, 4, 3)
    else:
        nibbles = data.view(count, -1, PANEL_ROWS, 2, 2)
        low, high = nibbles[:, :, :, 0], nibbles[:, :, :, 1]  # [panel][b][r][j / 2], columns of p = 0 and p = 1
        even, odd = (low & 15) | ((high & 15) << 4), (low >> 4) | (high & 0xF0)
        ordered = torch.stack((even, odd), dim=4).transpose(1, 2)
    natural = ordered.reshape(count * PANEL_ROWS, -1)
    width = -(-columns // 2) if kind.bits == 4 else columns
    natural = natural[:rows, :width].contiguous()
    return natural.view(torch.int8) if kind.codes is Codes.INT8 else natural


def _panel_scales(matrix: QuantMatrix) -> torch.Tensor:
    """uint8 [panels, scale_bytes]."""
    kind, count, width = matrix.format.scales, panels(matrix.rows), padded(matrix.columns)
    scales = matrix.scales
    assert scales is not None
    if kind is ScaleKind.ROW:
        return _filled(scales.view(1, -1), 1, count * PANEL_ROWS).view(count, PANEL_ROWS).view(torch.uint8)
    if kind is ScaleKind.BLOCK128:
        blocks = torch.arange(count) * PANEL_ROWS // 128
        return _filled(scales[blocks], count, -(-width // 128)).view(torch.uint8)
    groups = width // (16 if kind is ScaleKind.GROUP16 else 32)
    grid = _filled(scales, count * PANEL_ROWS, groups).view(count, PANEL_ROWS, groups).transpose(1, 2)
    ordered = grid.contiguous().view(count, -1).view(torch.uint8)
    if kind is not ScaleKind.GROUP16:
        return ordered
    assert matrix.row_scales is not None
    second = _filled(matrix.row_scales.view(1, -1), 1, count * PANEL_ROWS).view(count, PANEL_ROWS)
    return torch.cat((ordered, second.view(torch.uint8)), dim=1)


def _natural_scales(
    kind: Format, rows: int, columns: int, data: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    width = padded(columns)
    if kind.scales is ScaleKind.NONE:
        return None, None
    if kind.scales is ScaleKind.ROW:
        return data.view(torch.float32).reshape(-1)[:rows].clone(), None
    if kind.scales is ScaleKind.BLOCK128:
        blocks = data.view(torch.float32)[:: 128 // PANEL_ROWS, : -(-columns // 128)]
        return blocks.contiguous(), None
    if kind.scales is ScaleKind.GROUP16:
        ordered, second = torch.split(data, [width // 16 * PANEL_ROWS, 4 * PANEL_ROWS], dim=1)
        grid = _grid(ordered, width // 16)[:rows, : -(-columns // 16)].contiguous()
        return grid, second.contiguous().view(torch.float32).reshape(-1)[:rows].clone()
    stored = data if kind.scales is ScaleKind.MX32 else data.view(torch.float16)
    return _grid(stored, width // 32)[:rows, : -(-columns // 32)].contiguous(), None


def _grid(ordered: torch.Tensor, groups: int) -> torch.Tensor:
    """[panels][groups][16] -> [rows, groups]."""
    return ordered.reshape(-1, groups, PANEL_ROWS).transpose(1, 2).reshape(-1, groups)


def _filled(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A contiguous [rows, columns] with zeros below and to the right."""
    if values.shape == (rows, columns):
        return values.contiguous()
    out = values.new_zeros(rows, columns)
    out[: values.shape[0], : values.shape[1]] = values
    return out
