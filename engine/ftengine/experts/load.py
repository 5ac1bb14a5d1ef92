"""Fills one layer's bank of experts: blocks as FTW has them, or matrices packed one expert after the other."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ftengine.errors import CheckpointError
from ftengine.experts.pool import ExpertBank
from ftengine.formats.format import BF16, ExpertLayout, Format, panels
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.pack import pack_expert
from ftengine.weights.loader import WeightLoader
from ftengine.weights.stack import Matrix, packed, widened

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertShape:
    experts: int  # E
    hidden: int  # H
    intermediate: int  # I

    def of(self, projection: str) -> tuple[int, int]:
        down = projection == "down_proj"
        return (self.hidden, self.intermediate) if down else (self.intermediate, self.hidden)


def load_bank(loader: WeightLoader, layer: int, shape: ExpertShape) -> ExpertBank:
    """The routed experts of a layer. Raises CheckpointError that names what is missing or has another shape."""
    layout = loader.expert_layout(layer)
    if layout is None:
        return _pack_bank(loader, [f"layers.{layer}.mlp.experts.{expert}" for expert in range(shape.experts)], shape)
    if (layout.hidden, layout.intermediate) != (shape.hidden, shape.intermediate):
        raise CheckpointError(
            f"the experts of layer {layer} are {layout.intermediate} x {layout.hidden}, "
            f"expected {shape.intermediate} x {shape.hidden}"
        )
    bank = ExpertBank.allocate(layout, shape.experts)
    loader.read_experts(layer, bank.blocks)
    return bank


def load_one(loader: WeightLoader, prefix: str, hidden: int, intermediate: int) -> ExpertBank:
    """A bank of one: a shared expert or a dense feed-forward."""
    return _pack_bank(loader, [prefix], ExpertShape(1, hidden, intermediate))


def _pack_bank(loader: WeightLoader, prefixes: list[str], shape: ExpertShape) -> ExpertBank:
    # Every shape is checked before memory is taken for what the configuration claims.
    formats = {
        projection: _common(
            loader.check(f"{prefix}.{projection}.weight", shape.of(projection)).format for prefix in prefixes
        )
        for projection in PROJECTIONS
    }
    gate_up = _common((formats["gate_proj"], formats["up_proj"]))
    layout = ExpertLayout(shape.hidden, shape.intermediate, gate_up, formats["down_proj"])
    bank = ExpertBank.allocate(layout, shape.experts)

    def fill(expert: int) -> None:
        matrices = [
            loader.take_matrix(f"{prefixes[expert]}.{projection}.weight", *shape.of(projection))
            for projection in PROJECTIONS
        ]
        _fill(layout, matrices, bank.blocks[expert])

    with ThreadPoolExecutor(max(1, min(torch.get_num_threads(), len(prefixes)))) as threads:
        for _ in threads.map(fill, range(len(prefixes))):
            pass
    return bank


def _common(formats: Iterable[Format]) -> Format:
    """The format that all have, or BF16, which holds them all."""
    found = set(formats)
    return found.pop() if len(found) == 1 else BF16


def _fill(layout: ExpertLayout, matrices: list[Matrix], block: torch.Tensor) -> None:
    gate, up, down = (
        matrix if matrix.format is wanted else widened(matrix)
        for matrix, wanted in zip(matrices, (layout.gate_up, layout.gate_up, layout.down), strict=True)
    )
    if isinstance(gate, QuantMatrix) and isinstance(up, QuantMatrix) and isinstance(down, QuantMatrix):
        pack_expert(layout, gate, up, down, out=block, threads=1)
        return
    pairs = block[: layout.down_offset].view(panels(layout.intermediate), 2, -1)
    for place, matrix in enumerate((gate, up)):
        pairs[:, place].copy_(packed(matrix).data.view(len(pairs), -1))
    block[layout.down_offset : layout.bias_offset].copy_(packed(down).data)
