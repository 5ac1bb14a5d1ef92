"""Executors add weighted partial sums of experts into the caller's rows.

A layer's result is the sum over executors; which of them computes a route is not the model's business. Today one
executor computes every route where the experts lie, in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ftengine.experts.pool import ExpertBank, ExpertPool
from ftengine.kernels.packed import experts_packed


@dataclass(frozen=True)
class Routes:
    """Who computes what: token row t goes to expert_ids[t, k] with weights[t, k], in `layer`.

    expert_ids [T, K] integers, a negative id marks a route that another executor takes; weights [T, K] float32.
    """

    layer: int
    expert_ids: torch.Tensor
    weights: torch.Tensor


class ExpertExecutor(Protocol):
    def add_partial(self, hidden: torch.Tensor, routes: Routes, out: torch.Tensor) -> None:
        """Adds this executor's share of the routes into `out`. hidden [T, H]; out [T, H] float32."""
        ...


class HostExecutor:
    """Computes experts on the CPU, in place in the pool."""

    def __init__(self, pool: ExpertPool) -> None:
        self.pool = pool

    def add_partial(self, hidden: torch.Tensor, routes: Routes, out: torch.Tensor) -> None:
        add_experts(self.pool.bank(routes.layer), hidden, routes.expert_ids, routes.weights, out)


def add_experts(
    bank: ExpertBank, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """out [T, H] float32 += the weighted outputs of a bank's experts; shapes as in Routes."""
    experts_packed(hidden, expert_ids.int().contiguous(), weights.contiguous(), bank.layout, bank.blocks, out)
