"""Matrices applied to packed token rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Linear:
    """weight: [out, in]; bias: [out]. Takes [T, in], returns [T, out] in the weight's dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight, self.bias)


@dataclass(frozen=True)
class Embedding:
    """weight: [vocabulary, H]. Takes token ids [T], returns float32 [T, H]: the residual stream's start."""

    weight: torch.Tensor

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight).float()


@dataclass(frozen=True)
class SwiGlu:
    """down(silu(gate(x)) * up(x)). gate_up: [2I, H], gate's rows first; down: [H, I]."""

    gate_up: Linear
    down: Linear

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))

    def add_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> None:
        residual.add_(self(hidden))
