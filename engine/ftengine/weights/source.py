"""Where a model's weights come from, whatever the files are: the one view that loading and converting have of them.

Implementations: safetensors (weights/safetensors_source.py), GGUF (weights/gguf_source.py), FTW (weights/ftw/).
Names are canonical (weights/names.py): `layers.3.self_attn.q_proj.weight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ftengine.formats.format import ExpertLayout, Format

if TYPE_CHECKING:  # facts are asked for where torch is not loaded
    import torch

    from ftengine.formats.matrix import PackedMatrix, QuantMatrix


@dataclass(frozen=True)
class TensorFacts:
    """format: of a matrix with its scales folded in (`x.weight` stands for x.weight, x.weight_scale, ...)."""

    shape: tuple[int, ...]
    format: Format
    nbytes: int  # on disk, scales included


class Described(Protocol):
    """What weights are, without the weights themselves: what memory is planned with (memory/estimate.py)."""

    def tensors(self) -> dict[str, TensorFacts]: ...

    def expert_layout(self, layer: int) -> ExpertLayout | None: ...


class WeightSource(Protocol):
    """Raises CheckpointError for whatever the files have wrong. Safe to call from several threads."""

    def tensors(self) -> dict[str, TensorFacts]:
        """Every weight by canonical name. Scales are not listed: they belong to their matrix.

        Experts appear as `layers.N.mlp.experts.E.{gate_proj,up_proj,down_proj}.weight`, however they lie on disk
        (fused, transposed, w1/w3/w2); from FTW they do not appear at all: see `expert_layout`.
        """
        ...

    def plain(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of `name`'s shape, dequantized where need be."""
        ...

    def matrix(self, name: str) -> QuantMatrix | PackedMatrix:
        """A matrix as it lies on disk: natural order from checkpoints, panel order from FTW."""
        ...

    def expert_layout(self, layer: int) -> ExpertLayout | None:
        """FTW: the form of this layer's expert blocks. Else None: experts are ordinary tensors."""
        ...

    def read_experts(self, layer: int, out: torch.Tensor) -> None:
        """FTW: fills out, uint8 [E, block_bytes], with the layer's expert blocks."""
        ...

    def __enter__(self) -> WeightSource: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


@runtime_checkable
class BegunAhead(Protocol):
    """A source that may be reading a layer's experts before `read_experts` asks for them."""

    def begun_experts(self, layer: int) -> torch.Tensor | None:
        """The memory that they are read to, uint8 [E, block_bytes]: `read_experts` into it waits for them.

        None where nothing was begun. Only of a layer that has an expert_layout.
        """
        ...

    def end_ahead(self) -> None:
        """Nothing is read ahead any more when it returns; a `read_experts` that waits for it raises."""
        ...
