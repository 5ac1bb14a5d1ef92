"""Hands a model its weights by canonical name, each exactly once, in the form that kernels read.

Knows nothing of architectures, nor of files: a WeightSource stands before those. Matrices keep the format that they
are stored in and are packed here unless they come packed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from ftengine.errors import CheckpointError
from ftengine.formats.format import ExpertLayout
from ftengine.formats.matrix import PackedMatrix
from ftengine.weights.source import BegunAhead, TensorFacts, WeightSource
from ftengine.weights.stack import Matrix, packed, stack

Progress = Callable[[str, float], None]
STAGE = "loading weights"


class WeightLoader:
    """Use as a context manager around the building of a model, and call `finish` at its end."""

    def __init__(self, source: WeightSource, progress: Progress = lambda stage, done: None) -> None:
        self.source = source
        self._facts = source.tensors()
        self._left = set(self._facts)
        self._total = max(1, sum(facts.nbytes for facts in self._facts.values()))
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def __enter__(self) -> WeightLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.source.__exit__(kind, error, at)

    def __contains__(self, name: str) -> bool:
        return name in self._facts

    def check(self, name: str, shape: Sequence[int]) -> TensorFacts:
        """Raises CheckpointError unless the tensor exists with this shape."""
        facts = self._facts.get(name)
        if facts is None:
            raise CheckpointError(f"the tensor {name} is missing from the checkpoint")
        if facts.shape != tuple(shape):
            raise CheckpointError(f"the tensor {name} has shape {list(facts.shape)}, expected {list(shape)}")
        return facts

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A new float32 tensor of the given shape."""
        self.check(name, shape)
        tensor = self.source.plain(name, torch.float32)
        self._taken(name)
        return tensor

    def take_matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """As the source has it: packed or in natural order."""
        self.check(name, (rows, columns))
        matrix = self.source.matrix(name)
        self._taken(name)
        return matrix

    def take_packed(self, name: str, rows: int, columns: int) -> PackedMatrix:
        return packed(self.take_matrix(name, rows, columns))

    def take_rows(self, parts: Sequence[tuple[str, int]], columns: int) -> tuple[PackedMatrix, ...]:
        """Several matrices [rows, columns], one below the other: neighbours of one format become one matrix."""
        for name, rows in parts:
            self.check(name, (rows, columns))
        return stack([self.take_matrix(name, rows, columns) for name, rows in parts])

    def expert_layout(self, layer: int) -> ExpertLayout | None:
        return self.source.expert_layout(layer)

    def expect_experts(self, layers: int, experts: int) -> None:
        """Counts what `read_experts` will read into the progress."""
        layouts = filter(None, map(self.source.expert_layout, range(layers)))
        self._total += sum(experts * layout.block_bytes for layout in layouts)

    def begun_experts(self, layer: int) -> torch.Tensor | None:
        """Of a layer that has an expert_layout: memory for `read_experts` that is being filled already, if there is."""
        return self.source.begun_experts(layer) if isinstance(self.source, BegunAhead) else None

    def end_ahead(self) -> None:
        """Nothing is read before it is asked for any more."""
        if isinstance(self.source, BegunAhead):
            self.source.end_ahead()

    def read_experts(self, layer: int, out: torch.Tensor) -> None:
        """Of a layer that has an expert_layout: all blocks at once. out: uint8 [E, block_bytes]."""
        self.source.read_experts(layer, out)
        self._advance(out.nbytes)

    def finish(self) -> None:
        """Raises CheckpointError if the checkpoint holds a tensor that nobody asked for."""
        for name in sorted(self._left):
            raise CheckpointError(f"the tensor {name} has no place in this architecture")

    def _taken(self, name: str) -> None:
        with self._lock:
            first = name in self._left
            self._left.discard(name)
        if first:
            self._advance(self._facts[name].nbytes)

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(STAGE, min(1.0, self._done / self._total))
