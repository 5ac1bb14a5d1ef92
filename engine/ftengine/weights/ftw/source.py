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
from ftengine.weights.ftw.files import FtwFiles
from ftengine.weights.ftw.layout import ExpertSection, TensorSection
from ftengine.weights.source import TensorFacts

STORAGE = {Codes.FLOAT32: torch.float32, Codes.FLOAT16: torch.float16, Codes.BFLOAT16: torch.bfloat16}


class FtwSource:
    """A WeightSource, and one of those that are BegunAhead. Safe to call from several threads; one call already reads
    with several.
    """

    def __init__(self, files: Path | FtwFiles) -> None:
        """A folder, or what is open of it; closed by `__exit__`.

        Raises CheckpointError for a header that is unsound, a file that is missing or of another size.
        """
        self._files = FtwFiles(files) if isinstance(files, Path) else files
        self.path, self.header = self._files.path, self._files.header
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}

    def __enter__(self) -> FtwSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.close()

    def tensors(self) -> dict[str, TensorFacts]:
        """Every tensor outside the expert blocks."""
        return self._files.tensors()

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
        return self._files.expert_layout(layer)

    def begun_experts(self, layer: int) -> torch.Tensor | None:
        """Memory that the layer's blocks are being read to already, uint8 [E, block_bytes]: `read_experts` into it
        waits for them. None where they are not.
        """
        section = self._section(layer)
        memory = self._files.ahead(section)
        return None if memory is None else torch.from_numpy(memory).view(section.experts, -1)

    def end_ahead(self) -> None:
        """Nothing is read ahead any more when it returns."""
        self._files.end_ahead()

    def read_experts(self, layer: int, out: torch.Tensor) -> None:
        """Fills out, uint8 [E, block_bytes]."""
        memory = self._files.ahead(self._section(layer))
        if memory is not None and memory.ctypes.data == out.data_ptr():
            self._files.take(self._section(layer))
        else:
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
        self._files.read(section, first * size, out.view(-1).numpy())

    def _read(self, tensor: TensorSection) -> torch.Tensor:
        """uint8 [nbytes]. The memory is that of the whole section, so that direct I/O fills all of it."""
        memory = self._files.take(tensor)
        if memory is not None:
            return torch.from_numpy(memory)[: tensor.nbytes]
        buffer = host_buffer(tensor.extent)
        self._files.read(tensor, 0, buffer.numpy())
        return buffer[: tensor.nbytes]

    def _tensor(self, name: str) -> TensorSection:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"the tensor {name} is missing from {self.path}")
        return tensor

    def _section(self, layer: int) -> ExpertSection:
        section = self._files.experts.get(layer)
        if section is None:
            raise CheckpointError(f"{self.path} has no experts in layer {layer}")
        return section


def _matrix_shape(tensor: TensorSection) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise CheckpointError(f"the tensor {tensor.name} has shape {list(tensor.shape)}, which is no matrix")
    return tensor.shape[0], tensor.shape[1]
