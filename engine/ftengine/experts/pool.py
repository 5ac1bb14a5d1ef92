"""The complete pool of routed experts in host memory, addressed by (layer, expert)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class ExpertBank:
    """One layer's experts, contiguous. gate_up: [E, 2I, H], gate's rows first; down: [E, H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def experts(self) -> int:
        return self.gate_up.shape[0]


@dataclass
class ExpertPool:
    """Filled while a model loads, read-only afterwards. Layers are the model's own; dense ones have no bank."""

    banks: dict[int, ExpertBank] = field(default_factory=dict)

    def add(self, layer: int, bank: ExpertBank) -> None:
        self.banks[layer] = bank

    def bank(self, layer: int) -> ExpertBank:
        return self.banks[layer]

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one expert: gate_up [2I, H] and down [H, I]."""
        bank = self.banks[layer]
        return bank.gate_up[expert], bank.down[expert]

    @property
    def nbytes(self) -> int:
        return sum(bank.gate_up.nbytes + bank.down.nbytes for bank in self.banks.values())
