"""Packed matrices applied to packed token rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftengine.experts.executor import add_experts
from ftengine.experts.pool import ExpertBank
from ftengine.formats.matrix import PackedMatrix
from ftengine.kernels.packed import dequantize_rows, linear_packed


@dataclass(frozen=True)
class Linear:
    """parts: matrices [.., in], one below the other, `out` rows together; bias: [out] float32.

    Takes [T, in], returns [T, out] in float32, the sums' own precision.
    """

    parts: tuple[PackedMatrix, ...]
    bias: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        found = [linear_packed(part, hidden) for part in self.parts]
        out = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True)
class Embedding:
    """matrix: [vocabulary, H]. Takes token ids [T], returns float32 [T, H]: the residual stream's start."""

    matrix: PackedMatrix

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        return dequantize_rows(self.matrix, input_ids)


@dataclass(frozen=True)
class SwiGlu:
    """down(silu(gate(x)) * up(x)) as a bank of one expert."""

    bank: ExpertBank

    def add_to(self, residual: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """residual [T, H] float32 += weights [T, 1] (ones if None) * output for hidden [T, H]."""
        if weights is None:
            weights = torch.ones(len(hidden), 1)
        add_experts(self.bank, hidden, torch.zeros(len(hidden), 1, dtype=torch.int32), weights, residual)
