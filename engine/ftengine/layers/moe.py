"""Mixture-of-Experts feed-forward: a router picks experts a token, an executor adds their weighted outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ftengine.experts.executor import ExpertExecutor, Routes
from ftengine.layers.linear import Linear, SwiGlu


@dataclass(frozen=True)
class Router:
    """weight: [E, H] float32. `normalize`: the chosen probabilities are scaled to sum to one."""

    layer: int
    weight: torch.Tensor
    top_k: int
    normalize: bool

    def __call__(self, hidden: torch.Tensor) -> Routes:
        """hidden [T, H] -> routes, most probable expert first. Logits and softmax are float32."""
        probabilities = F.linear(hidden.float(), self.weight).softmax(-1)
        weights, expert_ids = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routes(self.layer, expert_ids, weights)


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token passes, scaled by a sigmoid gate. gate: [1, H]."""

    mlp: SwiGlu
    gate: Linear

    def add_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> None:
        residual.addcmul_(self.gate(hidden).float().sigmoid(), self.mlp(hidden).float())


@dataclass(frozen=True)
class MoeLayer:
    router: Router
    executor: ExpertExecutor
    shared: SharedExpert | None = None

    def add_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> None:
        """residual [T, H] float32 += the layer's output for hidden [T, H]."""
        self.executor.add_partial(hidden, self.router(hidden), residual)
        if self.shared is not None:
            self.shared.add_to(residual, hidden)
