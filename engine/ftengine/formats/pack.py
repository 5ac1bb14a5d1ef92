"""From the natural order of a matrix to the panel order that kernels read, and back (format.py has the order)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftengine.formats.format import ExpertLayout, panels
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.formats.native import NATIVE, threads_for
from ftengine.formats.panels import read_panels, write_panels

__all__ = ["ExpertBiases", "pack", "pack_expert", "unpack", "unpack_expert"]

if NATIVE:
    from ftengine import _native


@dataclass(frozen=True)
class ExpertBiases:
    """float32: gate, up [intermediate], down [hidden]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def pack(matrix: QuantMatrix, out: torch.Tensor | None = None, *, threads: int = 0) -> PackedMatrix:
    """`matrix` in panel order, in `out` if given: contiguous uint8 of format.matrix_bytes(rows, columns) bytes.

    Codes of 16 and 32 bits may be any strided view (a transposed one, every second row); so may the rows of others.
    threads: at most so many; 0 for torch's own setting where the matrix is worth it.
    """
    size = matrix.format.matrix_bytes(matrix.rows, matrix.columns)
    if out is None:
        out = torch.empty(size, dtype=torch.uint8)
    _check_out(out, size)
    _write(matrix, out.view(panels(matrix.rows), matrix.format.panel_bytes(matrix.columns)), threads)
    return PackedMatrix(matrix.format, matrix.rows, matrix.columns, out)


def unpack(matrix: PackedMatrix) -> QuantMatrix:
    """The inverse of `pack`, in new tensors."""
    count = panels(matrix.rows)
    data = matrix.data.view(count, matrix.format.panel_bytes(matrix.columns))
    return read_panels(matrix.format, matrix.rows, matrix.columns, data)


def pack_expert(
    layout: ExpertLayout,
    gate: QuantMatrix,
    up: QuantMatrix,
    down: QuantMatrix,
    biases: ExpertBiases | None = None,
    out: torch.Tensor | None = None,
    *,
    threads: int = 0,
) -> torch.Tensor:
    """One expert's block, uint8 [layout.block_bytes], in `out` if given. Bytes that carry nothing are zero."""
    if out is None:
        out = torch.empty(layout.block_bytes, dtype=torch.uint8)
    _check_out(out, layout.block_bytes)
    for matrix, expected, rows, columns in (
        (gate, layout.gate_up, layout.intermediate, layout.hidden),
        (up, layout.gate_up, layout.intermediate, layout.hidden),
        (down, layout.down, layout.hidden, layout.intermediate),
    ):
        if (matrix.format, matrix.rows, matrix.columns) != (expected, rows, columns):
            raise ValueError(f"expected {expected.name} [{rows}, {columns}], got {matrix.format.name}")
    if layout.bias != (biases is not None):
        raise ValueError("biases are to be given exactly where the layout has them")
    pairs, down_panels = _expert_views(layout, out)
    _write(gate, pairs[:, 0], threads)
    _write(up, pairs[:, 1], threads)
    _write(down, down_panels, threads)
    if biases is not None:
        joined = torch.cat((biases.gate, biases.up, biases.down)).float()
        out[layout.bias_offset : layout.used_bytes].view(torch.float32).copy_(joined)
    out[layout.used_bytes :].zero_()
    return out


def unpack_expert(
    layout: ExpertLayout, block: torch.Tensor
) -> tuple[QuantMatrix, QuantMatrix, QuantMatrix, ExpertBiases | None]:
    """gate, up, down and the biases of a block, in new tensors."""
    _check_out(block, layout.block_bytes)
    hidden, intermediate = layout.hidden, layout.intermediate
    pairs, down_panels = _expert_views(layout, block)
    gate = read_panels(layout.gate_up, intermediate, hidden, pairs[:, 0])
    up = read_panels(layout.gate_up, intermediate, hidden, pairs[:, 1])
    down = read_panels(layout.down, hidden, intermediate, down_panels)
    if not layout.bias:
        return gate, up, down, None
    joined = block[layout.bias_offset : layout.used_bytes].clone().view(torch.float32)
    return gate, up, down, ExpertBiases(*torch.split(joined, [intermediate, intermediate, hidden]))


def _expert_views(layout: ExpertLayout, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = block[: layout.down_offset].view(panels(layout.intermediate), 2, -1)
    return pairs, block[layout.down_offset : layout.bias_offset].view(panels(layout.hidden), -1)


def _check_out(out: torch.Tensor, size: int) -> None:
    if out.dtype != torch.uint8 or out.shape != (size,) or not out.is_contiguous():
        raise ValueError(f"expected {size} contiguous bytes, got {out.dtype} {tuple(out.shape)}")


def _write(matrix: QuantMatrix, out: torch.Tensor, threads: int) -> None:
    if not NATIVE:
        write_panels(matrix, out)
        return
    number, rows, columns = matrix.format.number, matrix.rows, matrix.columns
    _native.pack(
        number, rows, columns, matrix.codes, matrix.scales, matrix.row_scales, out, threads or threads_for(out.numel())
    )
