"""Which experts a measurement reads next: all others before one comes again, so that no cache holds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ftengine.experts.pool import ExpertBank

COUNTS = (1, 2, 4, 8)  # experts of a layer


class Cycle:
    """Each bank's experts in an order of its own, drawn once and gone through again and again."""

    def __init__(self, banks: Sequence[ExpertBank]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._orders = [torch.randperm(bank.experts, generator=generator) for bank in banks]
        self._next = [0] * len(banks)

    def take(self, bank: int, count: int) -> torch.Tensor:
        """int64 [count], all different as far as the bank has so many."""
        order, start = self._orders[bank], self._next[bank]
        self._next[bank] = (start + count) % len(order)
        return order[torch.arange(start, start + count) % len(order)]
