"""The weights of a GGUF file as Hugging Face's checkpoint would have them. See source.py for the contract.

What llama.cpp's converter changed is undone (gguf_layout.py). Q4_0, Q8_0, MXFP4, NVFP4 and the plain types keep their
codes; other types are dequantized by the gguf package and rounded to BF16.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from ftengine.errors import CheckpointError
from ftengine.formats.format import ExpertLayout
from ftengine.formats.matrix import QuantMatrix
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.gguf_blocks import kept, numbers, reorder_columns, reorder_rows
from ftengine.weights.gguf_header import GgufTensor
from ftengine.weights.gguf_kept import GROUP, OTHERWISE, format_of, is_kept
from ftengine.weights.gguf_layout import Change, Part, parts
from ftengine.weights.gguf_model import open_gguf
from ftengine.weights.ranges import Bytes
from ftengine.weights.reader import FilesOfTensors
from ftengine.weights.source import TensorFacts


class GgufSource:
    """Fulfils weights.source.WeightSource. Raises CheckpointError for a file whose weights have no place in a model."""

    def __init__(self, model: Path | Checkpoint) -> None:
        """A path is that of the file, or of the first of a model that is split into several."""
        files = model.gguf if isinstance(model, Checkpoint) else open_gguf(model)
        assert files is not None, "a checkpoint of another kind"
        self._parts = parts(files.header, files.config)
        self._files = FilesOfTensors()

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.close()

    def tensors(self) -> dict[str, TensorFacts]:
        return {name: TensorFacts(part.shape, format_of(part), part.nbytes) for name, part in self._parts.items()}

    def plain(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        part = self._part(name)
        return self._values(part).to(dtype, copy=True)

    def matrix(self, name: str) -> QuantMatrix:
        part = self._part(name)
        if len(part.shape) != 2:
            raise CheckpointError(f"{part.tensor.file}: {part.tensor.name} is not a matrix")
        if not is_kept(part):
            return QuantMatrix(OTHERWISE, *part.shape, self._values(part).to(torch.bfloat16))
        matrix = kept(self._read(part), part.tensor.type)
        if part.row_order is not None:
            matrix = reorder_rows(matrix, part.row_order.order(part.rows))
        if part.column_order is not None:
            group = GROUP.get(part.tensor.type.name, 1)
            matrix = reorder_columns(matrix, part.column_order.order(part.columns), group)
        if part.scale is not None:
            matrix = replace(matrix, row_scales=torch.full((part.rows,), self._scale(part)))
        return matrix

    def expert_layout(self, layer: int) -> ExpertLayout | None:
        return None

    def read_experts(self, layer: int, out: torch.Tensor) -> None:
        raise CheckpointError("a GGUF file holds no packed experts")

    def _part(self, name: str) -> Part:
        part = self._parts.get(name)
        if part is None:
            raise CheckpointError(f"the tensor {name} is missing from the checkpoint")
        return part

    def _values(self, part: Part) -> torch.Tensor:
        """In Hugging Face's order and shape; float32 unless stored in 16 bits and unchanged."""
        values = numbers(self._read(part), part.tensor.type).reshape(part.shape)
        if part.scale is not None:
            values = values.float() * self._scale(part)
        if part.change is Change.PLUS_ONE:
            values = values.float() - 1.0
        elif part.change is Change.NEGATIVE_EXP:
            values = torch.log(-values.double()).float()
        if part.row_order is not None:
            values = values[torch.from_numpy(part.row_order.order(part.shape[0]))]
        if part.column_order is not None:
            values = values[:, torch.from_numpy(part.column_order.order(part.columns))]
        return values

    def _scale(self, part: Part) -> float:
        assert part.scale is not None
        raw = self._bytes(part.scale, part.scale.start + 4 * part.expert, 4)
        return float(raw.view(np.float32)[0])

    def _read(self, part: Part) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """The part's stored rows, uint8 [rows, row bytes]."""
        raw = self._bytes(part.tensor, part.tensor.start + part.first * part.row_bytes, part.nbytes)
        return raw.reshape(part.rows, part.row_bytes)

    def _bytes(self, tensor: GgufTensor, start: int, count: int) -> Bytes:
        out = np.empty(count, np.uint8)
        self._files.read(tensor.file, tensor.name, start, out)
        return out
