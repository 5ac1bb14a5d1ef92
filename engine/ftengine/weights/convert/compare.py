"""Holds an FTW directory against the source it was made from: bit by bit, where formats differ after rounding again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ftengine.errors import CheckpointError
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.pack import ExpertBiases, unpack_expert
from ftengine.weights.convert.requantize import BLOCK_ROWS, requantized
from ftengine.weights.ftw.layout import ExpertSection, Header, TensorSection
from ftengine.weights.ftw.source import STORAGE, FtwSource
from ftengine.weights.source import WeightSource
from ftengine.weights.stack import natural


def compare(source: WeightSource, folder: Path, progress: Callable[[float], None] = lambda done: None) -> None:
    """Raises CheckpointError that names the first tensor which is not what the source has."""
    with FtwSource(folder) as written:
        header = written.header
        done = 0
        for tensor in header.tensors:
            _compare_tensor(source, written, tensor)
            done += tensor.extent
            progress(done / _total(header))
        for section in header.experts:
            for expert in range(section.experts):
                _compare_expert(source, written, section, expert)
                done += section.layout.block_bytes
                progress(done / _total(header))


def _total(header: Header) -> int:
    return sum(file.size for file in header.files)


def _compare_tensor(source: WeightSource, written: FtwSource, tensor: TensorSection) -> None:
    if tensor.packed:
        ours, theirs = natural(written.matrix(tensor.name)), natural(source.matrix(tensor.name))
        _compare_matrix(tensor.name, theirs, ours, BLOCK_ROWS)
        return
    dtype = STORAGE[tensor.number_format.codes]
    if not _same(source.plain(tensor.name, dtype), written.plain(tensor.name, dtype)):
        raise _different(tensor.name)


def _compare_expert(source: WeightSource, written: FtwSource, section: ExpertSection, expert: int) -> None:
    prefix = f"layers.{section.layer}.mlp.experts.{expert}"
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down, biases = _expert(written, section.layer, expert)
    if isinstance(source, FtwSource):
        theirs = list(_expert(source, section.layer, expert)[:3])
    else:
        theirs = [natural(source.matrix(f"{prefix}.{name}.weight")) for name in names]
        if biases is not None:
            for name, bias in zip(names, (biases.gate, biases.up, biases.down), strict=True):
                if not _same(source.plain(f"{prefix}.{name}.bias", torch.float32), bias):
                    raise _different(f"{prefix}.{name}.bias")
    for name, before, after in zip(names, theirs, (gate, up, down), strict=True):
        _compare_matrix(f"{prefix}.{name}.weight", before, after, before.rows)


def _expert(
    source: FtwSource, layer: int, expert: int
) -> tuple[QuantMatrix, QuantMatrix, QuantMatrix, ExpertBiases | None]:
    layout = source.expert_layout(layer)
    assert layout is not None
    block = torch.empty(1, layout.block_bytes, dtype=torch.uint8)
    source.read_blocks(layer, expert, block)
    return unpack_expert(layout, block[0])


def _compare_matrix(name: str, before: QuantMatrix, after: QuantMatrix, step: int) -> None:
    """step: rows that the conversion rounded at once."""
    for first in range(0, before.rows, step):
        last = min(first + step, before.rows)
        ours, theirs = after.part(first, last), requantized(before.part(first, last), after.format, name)
        pairs = ((ours.codes, theirs.codes), (ours.scales, theirs.scales), (ours.row_scales, theirs.row_scales))
        if not all(_same(one, other) for one, other in pairs):
            raise _different(name)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Bit by bit: NaN equals itself, and zeros have a sign."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _different(name: str) -> CheckpointError:
    return CheckpointError(f"{name} was not written as the source has it", "check disk and memory, and convert again")
