"""Fills one layer's bank of experts: blocks as FTW has them, or matrices packed one expert after the other."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
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
READ_AT_ONCE = 2  # layers: each is read with several threads already, and the next one begins while those run out


@dataclass(frozen=True)
class ExpertShape:
    experts: int  # E
    hidden: int  # H
    intermediate: int  # I

    def of(self, projection: str) -> tuple[int, int]:
        down = projection == "down_proj"
        return (self.hidden, self.intermediate) if down else (self.intermediate, self.hidden)


class BankLoader:
    """Loads the routed experts of one layer after another. Blocks that lie on disk as memory wants them are read
    beside whatever else the caller loads; `finish` waits for them."""

    def __init__(self, loader: WeightLoader) -> None:
        self._loader = loader
        self._threads = ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="experts")
        self._reading: list[Future[None]] = []

    def load(self, layer: int, shape: ExpertShape) -> ExpertBank:
        """Its blocks are there after `finish`. Raises CheckpointError that names what is missing or has another
        shape."""
        layout = self._loader.expert_layout(layer)
        if layout is None:
            prefixes = [f"layers.{layer}.mlp.experts.{expert}" for expert in range(shape.experts)]
            return _pack_bank(self._loader, prefixes, shape)
        if (layout.hidden, layout.intermediate) != (shape.hidden, shape.intermediate):
            raise CheckpointError(
                f"the experts of layer {layer} are {layout.intermediate} x {layout.hidden}, "
                f"expected {shape.intermediate} x {shape.hidden}"
            )
        begun = self._loader.begun_experts(layer)
        if begun is not None and len(begun) == shape.experts:
            bank = ExpertBank(layout, begun)
        else:
            bank = ExpertBank.allocate(layout, shape.experts)
        self._reading.append(self._threads.submit(self._loader.read_experts, layer, bank.blocks))
        return bank

    def finish(self) -> None:
        """Raises CheckpointError if a layer cannot be read."""
        for reading in self._reading:
            reading.result()
        self._reading.clear()

    def close(self) -> None:
        """Nothing is read any more when it returns: not even what a layer in the middle of the queue waits for."""
        self._loader.end_ahead()
        self._threads.shutdown(cancel_futures=True)


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
