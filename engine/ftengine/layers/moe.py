"""Mixture-of-Experts feed-forward: a router picks experts a token, an executor adds their weighted outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftengine.experts.executor import ExpertExecutor, Routes
from ftengine.layers.linear import Linear, SwiGlu


@dataclass(frozen=True)
class Router:
    """linear: [E, H], or [E + 1, H] with the gate of a shared expert in its last row.

    `normalize`: the chosen probabilities are scaled to sum to one.
    """

    layer: int
    linear: Linear
    experts: int
    top_k: int
    normalize: bool

    def __call__(self, hidden: torch.Tensor) -> tuple[Routes, torch.Tensor | None]:
        """hidden [T, H] -> routes, most probable expert first, and the shared expert's weights [T, 1] if it has any.

        Logits and softmax are float32.
        """
        logits = self.linear(hidden)
        probabilities = logits[:, : self.experts].softmax(-1)
        # A stable sort, not topk: of equals the lower id comes first.
        ordered, ids = probabilities.sort(stable=True, dim=-1, descending=True)
        weights, expert_ids = ordered[:, : self.top_k], ids[:, : self.top_k]
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        gates = logits[:, self.experts :].sigmoid() if logits.shape[1] > self.experts else None
        return Routes(self.layer, expert_ids, weights), gates


@dataclass(frozen=True)
class MoeLayer:
    """shared: an expert that every token passes, scaled by the router's gate if that has one."""

    router: Router
    executor: ExpertExecutor
    shared: SwiGlu | None = None

    def add_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> None:
        """residual [T, H] float32 += the layer's output for hidden [T, H]."""
        routes, gates = self.router(hidden)
        self.executor.add_partial(hidden, routes, residual)
        if self.shared is not None:
            self.shared.add_to(residual, hidden, gates)
