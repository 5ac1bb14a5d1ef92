"""Where one weight lies in the files of a safetensors checkpoint, and what belongs to it there. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ftengine.errors import CheckpointError
from ftengine.formats.format import Format
from ftengine.weights.header import TensorEntry
from ftengine.weights.scales import Scales
from ftengine.weights.source import TensorFacts

CODES = ("weight", "weight_packed", "weight_blocks")
SCALES = ("weight_scale", "weight_scale_inv")
SECOND_SCALES = ("weight_scale_2", "weight_global_scale")

Module = dict[str, TensorEntry]  # a module's tensors by the last part of their names


@dataclass(frozen=True)
class Rows:
    first: int = 0
    last: int | None = None
    step: int = 1

    @property
    def slice(self) -> slice:
        return slice(self.first, self.last, self.step)


ALL = Rows()


@dataclass(frozen=True)
class Piece:
    """A part of a tensor on disk: of its first index if that is given, then transposed, then these rows."""

    entry: TensorEntry
    index: int | None = None
    transposed: bool = False
    rows: Rows = ALL


@dataclass(frozen=True)
class Stored:
    """One weight by its canonical name."""

    name: str
    shape: tuple[int, ...]
    format: Format
    codes: Piece
    nbytes: int
    scales: Piece | None = None
    second: Piece | None = None
    reciprocal: bool = False  # `second` is one over the scale

    @property
    def facts(self) -> TensorFacts:
        return TensorFacts(self.shape, self.format, self.nbytes)


def codes_and_scales(module: Module) -> tuple[TensorEntry | None, Scales]:
    found = [module[leaf] for leaf in CODES if leaf in module]
    first = [module[leaf] for leaf in SCALES if leaf in module]
    second = [module[leaf] for leaf in SECOND_SCALES if leaf in module]
    for entries in (found, first, second):
        if len(entries) > 1:
            raise CheckpointError(f"the tensors {entries[0].name} and {entries[1].name} contradict each other")
    scales = [*first, *second]
    if scales and not found:
        raise CheckpointError(f"the tensor {scales[0].name} scales a weight that is missing")
    reciprocal = "weight_global_scale" in module
    return (
        found[0] if found else None,
        Scales(first[0] if first else None, second[0] if second else None, reciprocal),
    )
