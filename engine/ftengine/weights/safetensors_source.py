"""The weights of a folder of safetensors, whoever quantized them. See source.py for the contract."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import TracebackType

import torch

from ftengine.errors import CheckpointError
from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import Codes, ExpertLayout, ScaleKind
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.tables import e8m0
from ftengine.weights.arrange import arrange
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.header import TensorEntry
from ftengine.weights.quantization import check_method
from ftengine.weights.reader import DISK_DTYPES, TensorReader
from ftengine.weights.scales import grid_shape
from ftengine.weights.source import TensorFacts
from ftengine.weights.stored import Piece, Stored


class SafetensorsSource:
    """Fulfils weights.source.WeightSource. Raises CheckpointError for what is quantized in a way that is not read."""

    def __init__(self, folder: Path | Checkpoint) -> None:
        checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint.open(folder)
        check_method(checkpoint)
        self._stored = arrange(checkpoint)
        self._reader = TensorReader()
        self._last = threading.local()

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._reader.__exit__(kind, error, at)

    def tensors(self) -> dict[str, TensorFacts]:
        return {name: stored.facts for name, stored in self._stored.items()}

    def plain(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._find(name)
        if stored.scales is not None:
            return dequantize(self.matrix(name), dtype)
        if stored.codes == Piece(stored.codes.entry):
            out = torch.empty(stored.shape, dtype=dtype)
            self._reader.read(stored.codes.entry, out)
            return out
        return self._piece(stored.codes).to(dtype, memory_format=torch.contiguous_format, copy=True)

    def matrix(self, name: str) -> QuantMatrix:
        """Codes of a transposed or interleaved tensor are strided views of all that was read."""
        stored = self._find(name)
        if len(stored.shape) != 2:
            raise CheckpointError(f"the tensor {stored.codes.entry.name} of shape {list(stored.shape)} is not a matrix")
        rows, columns = stored.shape
        codes = self._piece(stored.codes)
        if stored.format.codes is Codes.E2M1:
            codes = codes.flatten(1)
        scales = self._scales(stored)
        return QuantMatrix(stored.format, rows, columns, codes, scales, self._row_scales(stored))

    def expert_layout(self, layer: int) -> ExpertLayout | None:
        return None

    def read_experts(self, layer: int, out: torch.Tensor) -> None:
        raise CheckpointError("a checkpoint of safetensors holds no packed experts")

    def _find(self, name: str) -> Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"the tensor {name} is missing from the checkpoint")
        return stored

    def _scales(self, stored: Stored) -> torch.Tensor | None:
        if stored.scales is None:
            return None
        scales = self._piece(stored.scales)
        if stored.format.scales not in (ScaleKind.ROW, ScaleKind.BLOCK128):
            return scales
        scales = e8m0(scales) if stored.scales.entry.dtype == "F8_E8M0" else scales.float()
        if stored.format.scales is ScaleKind.BLOCK128:
            return scales.reshape(grid_shape(tuple(scales.shape)))
        return scales.reshape(-1).expand(stored.shape[0]).contiguous()

    def _row_scales(self, stored: Stored) -> torch.Tensor | None:
        if stored.second is None:
            return None
        second = self._piece(stored.second).reshape(1)
        if stored.reciprocal:
            second = 1 / second
        if not math.isfinite(second.item()):
            raise CheckpointError(f"the tensor {stored.second.entry.name} is no scale: it makes {second.item()}")
        return second.repeat(stored.shape[0])

    def _piece(self, piece: Piece) -> torch.Tensor:
        entry, index, rows = piece.entry, piece.index, piece.rows
        shape = entry.shape if index is None else entry.shape[1:]
        first = 0 if index is None else index * math.prod(shape)
        if piece.transposed or rows.step > 1:
            whole = self._whole(entry, first, shape)
            return (whole.T if piece.transposed else whole)[rows.slice]
        start, stop, _ = rows.slice.indices(shape[0]) if shape else (0, 1, 1)
        if shape:
            first += start * math.prod(shape[1:])
            shape = (stop - start, *shape[1:])
        return self._read(entry, first, shape)

    def _whole(self, entry: TensorEntry, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Gate and up are asked for one after the other, and both need all that lies in the file."""
        key = (entry.name, first)
        if getattr(self._last, "key", None) != key:
            self._last.key, self._last.tensor = key, self._read(entry, first, shape)
        tensor: torch.Tensor = self._last.tensor
        return tensor

    def _read(self, entry: TensorEntry, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        out = torch.empty(shape, dtype=DISK_DTYPES[entry.dtype])
        self._reader.read(entry, out, first)
        return out
