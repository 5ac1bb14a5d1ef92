"""Executors add weighted partial sums of experts into the caller's rows.

A layer's result is the sum over executors; which of them computes a route is not the model's business. Today one
executor computes every route where the experts lie, in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ftengine.experts.pool import ExpertPool
from ftengine.kernels.table import moe_experts


@dataclass(frozen=True)
class Routes:
    """Who computes what: token row t goes to expert_ids[t, k] with weights[t, k], in `layer`.

    expert_ids [T, K] int64, a negative id marks a route that another executor takes; weights [T, K] float32.
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
        bank = self.pool.bank(routes.layer)
        moe_experts(hidden, routes.expert_ids, routes.weights, bank.gate_up, bank.down, out)
