"""An FTW directory as a source of weights: every read goes straight into the memory that the engine computes from."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

from ftengine.errors import CheckpointError
from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import Codes, ExpertLayout
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.formats.pack import unpack
from ftengine.weights.buffer import host_buffer
from ftengine.weights.ftw.header import data_path, read_header
from ftengine.weights.ftw.layout import ExpertSection, TensorSection
from ftengine.weights.ranges import RangeReader
from ftengine.weights.source import TensorFacts

STORAGE = {Codes.FLOAT32: torch.float32, Codes.FLOAT16: torch.float16, Codes.BFLOAT16: torch.bfloat16}


class FtwSource:
    """A WeightSource. Safe to call from several threads; one call already reads with several.

    Raises CheckpointError when it is made: a header that is unsound, a file that is missing or of another size.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.header = read_header(folder)
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}
        self._experts = {section.layer: section for section in self.header.experts}
        self._reader = RangeReader([data_path(folder, file.name, file.size) for file in self.header.files])

    def __enter__(self) -> FtwSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._reader.close()

    def tensors(self) -> dict[str, TensorFacts]:
        """Every tensor outside the expert blocks."""
        return {
            name: TensorFacts(tensor.shape, tensor.number_format, tensor.nbytes)
            for name, tensor in self._tensors.items()
        }

    def plain(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of `name`'s shape, dequantized where need be."""
        tensor = self._tensor(name)
        data = self._read(tensor)
        if tensor.packed:
            return dequantize(unpack(PackedMatrix(tensor.number_format, *_matrix_shape(tensor), data)), dtype)
        return data.view(STORAGE[tensor.number_format.codes]).view(tensor.shape).to(dtype)

    def matrix(self, name: str) -> QuantMatrix | PackedMatrix:
        """In panel order, and in natural order what FTW keeps row by row (routers, the shared expert's gate)."""
        tensor = self._tensor(name)
        rows, columns = _matrix_shape(tensor)
        data = self._read(tensor)
        if tensor.packed:
            return PackedMatrix(tensor.number_format, rows, columns, data)
        codes = data.view(STORAGE[tensor.number_format.codes]).view(rows, columns)
        return QuantMatrix(tensor.number_format, rows, columns, codes)

    def expert_layout(self, layer: int) -> ExpertLayout | None:
        """The form of this layer's blocks; None for a layer without routed experts."""
        section = self._experts.get(layer)
        return None if section is None else section.layout

    def read_experts(self, layer: int, out: torch.Tensor) -> None:
        """Fills out, uint8 [E, block_bytes]."""
        self.read_blocks(layer, 0, out)

    def read_blocks(self, layer: int, first: int, out: torch.Tensor) -> None:
        """Fills out, uint8 [n, block_bytes], contiguous, with the blocks of the experts from `first` on."""
        section = self._section(layer)
        size = section.layout.block_bytes
        if out.dtype != torch.uint8 or out.dim() != 2 or out.shape[1] != size or not out.is_contiguous():
            raise ValueError(f"expected contiguous bytes [n, {size}], got {out.dtype} {list(out.shape)}")
        if not 0 <= first <= first + out.shape[0] <= section.experts:
            raise CheckpointError(
                f"{self.path} has {section.experts} experts in layer {layer}, {first + out.shape[0]} are wanted"
            )
        self._reader.read(section.file, section.offset + first * size, out.view(-1).numpy())

    def _read(self, tensor: TensorSection) -> torch.Tensor:
        """uint8 [nbytes]. The memory is that of the whole section, so that direct I/O fills all of it."""
        buffer = host_buffer(tensor.extent)
        self._reader.read(tensor.file, tensor.offset, buffer.numpy())
        return buffer[: tensor.nbytes]

    def _tensor(self, name: str) -> TensorSection:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"the tensor {name} is missing from {self.path}")
        return tensor

    def _section(self, layer: int) -> ExpertSection:
        section = self._experts.get(layer)
        if section is None:
            raise CheckpointError(f"{self.path} has no experts in layer {layer}")
        return section


def _matrix_shape(tensor: TensorSection) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise CheckpointError(f"the tensor {tensor.name} has shape {list(tensor.shape)}, which is no matrix")
    return tensor.shape[0], tensor.shape[1]
