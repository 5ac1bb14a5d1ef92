"""The work of a conversion, cut into units that a thread does from reading to writing."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ftengine.errors import CheckpointError
from ftengine.formats.format import Format, aligned
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.formats.pack import ExpertBiases, pack, pack_expert, unpack_expert
from ftengine.weights.convert.losses import Deviation, Losses
from ftengine.weights.convert.plan import Plan
from ftengine.weights.convert.requantize import BLOCK_ROWS, requantized
from ftengine.weights.ftw.layout import SECTION_ALIGN, ExpertSection, TensorSection
from ftengine.weights.ftw.source import STORAGE, FtwSource
from ftengine.weights.ftw.writer import SectionWriter
from ftengine.weights.ranges import Bytes, aligned_bytes
from ftengine.weights.source import WeightSource
from ftengine.weights.stack import natural

UNIT_BYTES = 16 << 20  # of expert blocks that are written at once


@dataclass(frozen=True)
class ExpertRange:
    section: ExpertSection
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * self.section.layout.block_bytes


Unit = TensorSection | ExpertRange


def units(plan: Plan) -> Iterator[Unit]:
    """In the order of the files, so that a disk writes in one direction."""
    yield from plan.tensors
    for section in plan.experts:
        step = max(1, UNIT_BYTES // section.layout.block_bytes)
        for first in range(0, section.experts, step):
            yield ExpertRange(section, first, min(first + step, section.experts))


class Worker:
    """Does units. Safe to call from several threads; each has a buffer of its own.

    written: called with a number of bytes. Every method returns SHA-256 hashes of what it wrote.
    """

    def __init__(
        self, source: WeightSource, writer: SectionWriter, losses: Losses, written: Callable[[int], None]
    ) -> None:
        self._source = source
        self._writer = writer
        self._losses = losses
        self._written = written
        self._local = threading.local()

    def do(self, unit: Unit) -> list[str]:
        if isinstance(unit, ExpertRange):
            return self._experts(unit)
        return [self._matrix(unit) if unit.packed else self._plain(unit)]

    def _plain(self, section: TensorSection) -> str:
        tensor = self._source.plain(section.name, STORAGE[section.number_format.codes])
        if tensor.shape != section.shape:
            raise CheckpointError(f"the tensor {section.name} changed its shape while it was read")
        buffer = self._buffer(section.extent)
        torch.from_numpy(buffer)[: section.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        buffer[section.nbytes :] = 0
        return self._put(section.file, section.offset, [buffer])[0]

    def _matrix(self, section: TensorSection) -> str:
        matrix, form = self._source.matrix(section.name), section.number_format
        digest, offset = hashlib.sha256(), section.offset
        for packed in self._packed_blocks(section.name, matrix, form):
            buffer = self._buffer(aligned(packed.numel(), SECTION_ALIGN))
            if packed.data_ptr() != buffer.ctypes.data:
                torch.from_numpy(buffer)[: packed.numel()] = packed
            buffer[packed.numel() :] = 0
            digest.update(buffer.data)
            self._writer.write(section.file, offset, buffer)
            self._written(buffer.size)
            offset += buffer.size
        return digest.hexdigest()

    def _packed_blocks(self, name: str, matrix: QuantMatrix | PackedMatrix, form: Format) -> Iterator[torch.Tensor]:
        """The matrix in panel order, uint8, BLOCK_ROWS rows at a time. What lies in the buffer is lost by the next."""
        step = form.matrix_bytes(BLOCK_ROWS, matrix.columns)
        if isinstance(matrix, PackedMatrix) and matrix.format is form:
            for at in range(0, matrix.data.numel(), step):
                yield matrix.data[at : at + step]
            return
        plain = natural(matrix)
        deviation = Deviation(name) if plain.format is not form else None
        for first in range(0, plain.rows, BLOCK_ROWS):
            part = plain.part(first, min(first + BLOCK_ROWS, plain.rows))
            size = form.matrix_bytes(part.rows, part.columns)
            out = torch.from_numpy(self._buffer(aligned(size, SECTION_ALIGN)))[:size]
            yield pack(requantized(part, form, name, deviation), out, threads=1).data
        if deviation is not None:
            self._losses.add(deviation, form)

    def _experts(self, unit: ExpertRange) -> list[str]:
        section, layout = unit.section, unit.section.layout
        buffer = self._buffer(unit.nbytes)
        blocks = torch.from_numpy(buffer).view(-1, layout.block_bytes)
        source = self._source
        if isinstance(source, FtwSource) and source.expert_layout(section.layer) == layout:
            source.read_blocks(section.layer, unit.first, blocks)
        else:
            for expert, block in zip(range(unit.first, unit.last), blocks, strict=True):
                self._expert(section, expert, block)
        offset = section.offset + unit.first * layout.block_bytes
        return self._put(section.file, offset, list(buffer.reshape(-1, layout.block_bytes)), buffer)

    def _expert(self, section: ExpertSection, expert: int, out: torch.Tensor) -> None:
        prefix, layout = f"layers.{section.layer}.mlp.experts.{expert}", section.layout
        (gate, up, down), biases = self._natural_expert(section, expert)
        pack_expert(
            layout,
            self._in_format(gate, layout.gate_up, f"{prefix}.gate_proj.weight"),
            self._in_format(up, layout.gate_up, f"{prefix}.up_proj.weight"),
            self._in_format(down, layout.down, f"{prefix}.down_proj.weight"),
            biases,
            out,
            threads=1,
        )

    def _natural_expert(
        self, section: ExpertSection, expert: int
    ) -> tuple[tuple[QuantMatrix, QuantMatrix, QuantMatrix], ExpertBiases | None]:
        source = self._source
        if isinstance(source, FtwSource):
            layout = source.expert_layout(section.layer)
            assert layout is not None
            block = torch.empty(1, layout.block_bytes, dtype=torch.uint8)
            source.read_blocks(section.layer, expert, block)
            gate, up, down, biases = unpack_expert(layout, block[0])
            return (gate, up, down), biases
        prefix = f"layers.{section.layer}.mlp.experts.{expert}"
        gate, up, down = (natural(source.matrix(f"{prefix}.{name}_proj.weight")) for name in ("gate", "up", "down"))
        if not section.bias:
            return (gate, up, down), None
        found = [source.plain(f"{prefix}.{name}_proj.bias", torch.float32) for name in ("gate", "up", "down")]
        return (gate, up, down), ExpertBiases(*found)

    def _in_format(self, matrix: QuantMatrix, form: Format, name: str) -> QuantMatrix:
        if matrix.format is form:
            return matrix
        deviation = Deviation(name)
        result = requantized(matrix, form, name, deviation)
        self._losses.add(deviation, form)
        return result

    def _put(self, file: int, offset: int, pieces: list[Bytes], whole: Bytes | None = None) -> list[str]:
        """One hash a piece; they are written as one."""
        hashes = [hashlib.sha256(piece.data).hexdigest() for piece in pieces]
        buffer = pieces[0] if whole is None else whole
        self._writer.write(file, offset, buffer)
        self._written(buffer.size)
        return hashes

    def _buffer(self, size: int) -> Bytes:
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.size < size:
            buffer = self._local.buffer = aligned_bytes(max(size, UNIT_BYTES))
        return buffer[:size]
