"""Matrices one below the other, and rows in another order, in whatever format and order they come."""

from __future__ import annotations

import torch

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import BF16, F32, PANEL_ROWS, Format, ScaleKind
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.formats.pack import pack, unpack
from ftengine.weights.buffer import host_buffer

Matrix = QuantMatrix | PackedMatrix

BLOCK = 128  # rows that one scale of ScaleKind.BLOCK128 covers


def packed(matrix: Matrix) -> PackedMatrix:
    if isinstance(matrix, PackedMatrix):
        return matrix
    return pack(matrix, host_buffer(matrix.format.matrix_bytes(matrix.rows, matrix.columns)))


def natural(matrix: Matrix) -> QuantMatrix:
    return matrix if isinstance(matrix, QuantMatrix) else unpack(matrix)


def widened(matrix: Matrix, form: Format = BF16) -> QuantMatrix:
    """As BF16 or F32, for the rare place where stored formats do not go together."""
    plain = natural(matrix)
    if plain.format is form:
        return plain
    dtype = torch.bfloat16 if form is BF16 else torch.float32
    return QuantMatrix(form, plain.rows, plain.columns, dequantize(plain, dtype))


def stack(matrices: list[Matrix]) -> tuple[PackedMatrix, ...]:
    """One packed matrix for each run of neighbours that have a format in common and end where panels do.

    Empties the list, so that no matrix is in memory twice.
    """
    parts: list[PackedMatrix] = []
    while matrices:
        run = [matrices.pop(0)]
        while matrices and matrices[0].format is run[0].format and run[-1].rows % _unit(run[-1]) == 0:
            run.append(matrices.pop(0))
        parts.append(packed(run[0]) if len(run) == 1 else _join(run))
    return tuple(parts)


def _unit(matrix: Matrix) -> int:
    """Rows that stay together: a block of scales or a panel."""
    return BLOCK if matrix.format.scales is ScaleKind.BLOCK128 else PANEL_ROWS


def _join(run: list[Matrix]) -> PackedMatrix:
    form, columns = run[0].format, run[0].columns
    rows = sum(matrix.rows for matrix in run)
    data = host_buffer(form.matrix_bytes(rows, columns))
    sizes = [form.matrix_bytes(matrix.rows, columns) for matrix in run]
    for matrix, out in zip(run, torch.split(data, sizes), strict=True):
        if isinstance(matrix, PackedMatrix):
            out.copy_(matrix.data)
        else:
            pack(matrix, out)
    return PackedMatrix(form, rows, columns, data)


def part(matrix: Matrix, first: int, last: int) -> Matrix:
    """Rows [first, last), as views where the form allows."""
    unit = _unit(matrix)
    even = first % unit == 0 and (last % unit == 0 or last == matrix.rows)
    if isinstance(matrix, PackedMatrix) and even:
        low, high = (matrix.format.matrix_bytes(rows, matrix.columns) for rows in (first, last))
        return PackedMatrix(matrix.format, last - first, matrix.columns, matrix.data[low:high])
    plain = natural(matrix)
    if plain.format.scales is ScaleKind.BLOCK128 and not even:
        plain = widened(plain, F32)
    return plain.part(first, last)


def halves_apart(matrix: Matrix, size: int) -> Matrix:
    """Rows [a0, b0, a1, b1, …], each a or b of `size` rows, in the order [a0, a1, …, b0, b1, …]."""
    groups = matrix.rows // size
    order = torch.arange(groups).view(-1, 2).T.flatten()
    even = size % _unit(matrix) == 0
    if isinstance(matrix, PackedMatrix) and even:
        blocks = matrix.data.view(groups, -1)[order].flatten()
        return PackedMatrix(matrix.format, matrix.rows, matrix.columns, blocks)
    plain = natural(matrix)
    if plain.format.scales is ScaleKind.BLOCK128 and not even:
        plain = widened(plain, F32)

    def ordered(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.view(groups, -1, *tensor.shape[1:])[order].flatten(0, 1)

    codes = ordered(plain.codes)
    assert codes is not None
    return QuantMatrix(plain.format, plain.rows, plain.columns, codes, ordered(plain.scales), ordered(plain.row_scales))
