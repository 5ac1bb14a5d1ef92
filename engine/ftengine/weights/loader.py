"""Hands a model its tensors by canonical name, each exactly once, and accounts for every one of them.

Knows nothing of architectures: the caller says how names on disk map to canonical ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from ftengine.errors import CheckpointError
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.header import TensorEntry
from ftengine.weights.reader import DISK_DTYPES, TensorReader

Progress = Callable[[str, float], None]
STAGE = "loading weights"


class TensorLoader:
    """Use as a context manager around the building of a model, and call `finish` at its end.

    canonical: name on disk -> canonical name, or None for tensors that this model has no use for.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        canonical: Callable[[str], str | None],
        progress: Progress = lambda stage, done: None,
    ) -> None:
        self.dtype = dtype
        self._entries: dict[str, TensorEntry] = {}
        for disk_name, entry in checkpoint.tensors().items():
            name = canonical(disk_name)
            if name is None:
                continue
            if name in self._entries:
                raise CheckpointError(f"the tensors {disk_name} and {self._entries[name].name} are the same one")
            self._entries[name] = entry
        self._left = dict(self._entries)
        self._total = max(1, sum(entry.nbytes for entry in self._entries.values()))
        self._done = 0
        self._progress = progress
        self._reader = TensorReader()

    def __enter__(self) -> TensorLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._reader.__exit__(kind, error, at)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises CheckpointError unless the tensor exists with this shape and a floating dtype."""
        entry = self._entry(name)
        if entry.shape != tuple(shape):
            raise CheckpointError(f"the tensor {entry.name} has shape {list(entry.shape)}, expected {list(shape)}")
        if entry.dtype not in DISK_DTYPES:
            raise CheckpointError(
                f"the tensor {entry.name} has dtype {entry.dtype}; served are {', '.join(sorted(DISK_DTYPES))}"
            )

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor of the given shape; dtype: the model's, unless said otherwise."""
        self.check(name, shape)
        out = torch.empty(shape, dtype=dtype or self.dtype)
        self.read(name, out)
        return out

    def take_rows(self, parts: Sequence[tuple[str, int]], columns: int) -> torch.Tensor:
        """Several matrices [rows, columns] over the same columns, stacked into one: [sum of rows, columns]."""
        for name, rows in parts:
            self.check(name, (rows, columns))
        out = torch.empty(sum(rows for _, rows in parts), columns, dtype=self.dtype)
        for (name, _), block in zip(parts, torch.split(out, [rows for _, rows in parts]), strict=True):
            self.read(name, block)
        return out

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills the contiguous `out`, whose shape the caller has checked."""
        self._reader.read(self._entry(name), out)
        self.taken(name)

    def read_part(self, name: str, out: torch.Tensor, first: int) -> None:
        """Fills `out` with elements from number `first` on; `taken` is to be called after the last part."""
        self._reader.read(self._entry(name), out, first)

    def taken(self, name: str) -> None:
        entry = self._left.pop(name, None)
        if entry is not None:
            self._done += entry.nbytes
            self._progress(STAGE, self._done / self._total)

    def finish(self) -> None:
        """Raises CheckpointError if the checkpoint holds a tensor that nobody asked for."""
        for name, entry in self._left.items():
            raise CheckpointError(f"the tensor {entry.name} ({name}) has no place in this architecture")

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"the tensor {name} is missing from the checkpoint")
        return entry
