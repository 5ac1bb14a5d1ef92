"""From packed bytes in host memory to matrices in natural order on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ftengine.formats.format import F32, PANEL_ROWS, Codes, ExpertLayout, Format, ScaleKind, panels
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.formats.panels import STORAGE, read_panels
from ftengine.kernels.triton.dequantize import dequantize_rows

CHUNK_BYTES = 32 << 20  # packed bytes that are on the device, or in pinned memory, at a time
BLOCK_ROWS = 128  # chunks end where blocks of scales do


class SingleExpert(Protocol):
    """A bank of one expert: blocks uint8 [1, layout.block_bytes]."""

    @property
    def layout(self) -> ExpertLayout: ...
    @property
    def blocks(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class DeviceSwiGlu:
    """A SwiGLU's matrices on the device. gate_up: [2 * intermediate, H], gate's rows first; down: [H, intermediate]."""

    gate_up: QuantMatrix
    down: QuantMatrix
    intermediate: int


@dataclass(frozen=True)
class _Panels:
    """A matrix in host memory. data: uint8 [panels, panel_bytes], panels of any stride."""

    format: Format
    rows: int
    columns: int
    data: torch.Tensor


_Part = TypeVar("_Part", _Panels, QuantMatrix)


def upload(parts: tuple[PackedMatrix, ...], device: torch.device | str) -> tuple[QuantMatrix, ...]:
    """The same rows in natural order on the device, neighbours of one format as one matrix.

    Takes a few CHUNK_BYTES of the device's memory beside the result, and of pinned host memory. Does not wait:
    synchronize once before the first `linear`, which may read weights ahead of the kernels before it.
    """
    shaped = [_Panels(part.format, part.rows, part.columns, part.data.view(panels(part.rows), -1)) for part in parts]
    return tuple(_upload_joined(run, torch.device(device)) for run in _runs(shaped))


def upload_swiglu(bank: SingleExpert, device: torch.device | str) -> DeviceSwiGlu:
    """The matrices of a bank of one expert. Raises ValueError where it has biases.

    gate_up is F32, exactly, where blocks of 128 rows do not end where gate's rows do.
    """
    layout, block = bank.layout, bank.blocks[0]
    if layout.bias:
        raise ValueError("a shared expert with biases does not go to the device")
    pairs = block[: layout.down_offset].view(panels(layout.intermediate), 2, -1)
    down = block[layout.down_offset : layout.bias_offset].view(panels(layout.hidden), -1)
    sides = [_Panels(layout.gate_up, layout.intermediate, layout.hidden, pairs[:, side]) for side in range(2)]
    found = [_upload_joined(run, torch.device(device)) for run in _runs(sides)]
    gate_up = found[0] if len(found) == 1 else _plain(found)
    last = _upload_joined([_Panels(layout.down, layout.hidden, layout.intermediate, down)], torch.device(device))
    return DeviceSwiGlu(gate_up, last, layout.intermediate)


def stack(parts: tuple[QuantMatrix, ...]) -> tuple[QuantMatrix, ...]:
    """`parts` with neighbours of one format joined in new tensors, so that `linear` has fewer kernels to launch."""
    return tuple(run[0] if len(run) == 1 else _joined(run) for run in _runs(parts))


def _runs(parts: Iterable[_Part]) -> list[list[_Part]]:
    """Neighbours that one QuantMatrix can hold together."""
    runs: list[list[_Part]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.format, last.columns) == (part.format, part.columns) and _ends_block(last):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _ends_block(part: _Panels | QuantMatrix) -> bool:
    return part.format.scales is not ScaleKind.BLOCK128 or part.rows % BLOCK_ROWS == 0


def _upload_joined(parts: list[_Panels], device: torch.device) -> QuantMatrix:
    kind, columns = parts[0].format, parts[0].columns
    whole = _allocate(kind, sum(part.rows for part in parts), columns, device)
    rows = max(CHUNK_BYTES // kind.panel_bytes(columns) * PANEL_ROWS // BLOCK_ROWS, 1) * BLOCK_ROWS
    at = 0
    for part in parts:
        for first in range(0, part.rows, rows):
            last = min(first + rows, part.rows)
            data = _to_device(part.data[first // PANEL_ROWS : panels(last)], device)
            _copy(read_panels(kind, last - first, columns, data), _rows_of(whole, at, at + last - first))
            at += last - first
    return whole


def _to_device(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Through pinned memory, which torch keeps and hands out again once the copy from it is done."""
    if device.type == "cpu":
        return data
    try:
        pinned = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    except RuntimeError:  # the system gives no more of it: slower, but it works
        return data.to(device)
    return pinned.copy_(data).to(device, non_blocking=True)


def _allocate(kind: Format, rows: int, columns: int, device: torch.device) -> QuantMatrix:
    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    small = torch.int8 if kind.codes is Codes.INT8 else torch.uint8
    codes = empty(STORAGE.get(kind.codes, small), rows, -(-columns // 2) if kind.bits == 4 else columns)
    if kind.scales is ScaleKind.NONE:
        return QuantMatrix(kind, rows, columns, codes)
    if kind.scales is ScaleKind.ROW:
        return QuantMatrix(kind, rows, columns, codes, empty(torch.float32, rows))
    if kind.scales is ScaleKind.BLOCK128:
        return QuantMatrix(kind, rows, columns, codes, empty(torch.float32, -(-rows // 128), -(-columns // 128)))
    if kind.scales is ScaleKind.GROUP16:
        scales = empty(torch.uint8, rows, -(-columns // 16))
        return QuantMatrix(kind, rows, columns, codes, scales, empty(torch.float32, rows))
    stored = torch.uint8 if kind.scales is ScaleKind.MX32 else torch.float16
    return QuantMatrix(kind, rows, columns, codes, empty(stored, rows, -(-columns // 32)))


def _rows_of(matrix: QuantMatrix, first: int, last: int) -> QuantMatrix:
    """As `matrix.part`, but blocks of scales may go on after `last`."""
    if matrix.format.scales is not ScaleKind.BLOCK128 or matrix.scales is None:
        return matrix.part(first, last)
    scales = matrix.scales[first // BLOCK_ROWS : -(-last // BLOCK_ROWS)]
    return QuantMatrix(matrix.format, last - first, matrix.columns, matrix.codes[first:last], scales)


def _copy(source: QuantMatrix, target: QuantMatrix) -> None:
    target.codes.copy_(source.codes)
    for ours, theirs in ((target.scales, source.scales), (target.row_scales, source.row_scales)):
        if ours is not None and theirs is not None:
            ours.copy_(theirs)


def _joined(parts: list[QuantMatrix]) -> QuantMatrix:
    whole = _allocate(parts[0].format, sum(part.rows for part in parts), parts[0].columns, parts[0].codes.device)
    at = 0
    for part in parts:
        _copy(part, _rows_of(whole, at, at + part.rows))
        at += part.rows
    return whole


def _plain(parts: list[QuantMatrix]) -> QuantMatrix:
    whole = _allocate(F32, sum(part.rows for part in parts), parts[0].columns, parts[0].codes.device)
    at = 0
    for part in parts:
        dequantize_rows(part, 0, whole.codes[at : at + part.rows])
        at += part.rows
    return whole
