"""The complete pool of routed experts in host memory, addressed by (layer, expert)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ftengine.formats.format import ExpertLayout
from ftengine.weights.buffer import host_buffer


@dataclass(frozen=True)
class ExpertBank:
    """One layer's experts, each a block that the kernels read in order. blocks: uint8 [E, layout.block_bytes]."""

    layout: ExpertLayout
    blocks: torch.Tensor

    @property
    def experts(self) -> int:
        return self.blocks.shape[0]

    @staticmethod
    def allocate(layout: ExpertLayout, experts: int) -> ExpertBank:
        """Zero-filled. Raises MemoryError."""
        return ExpertBank(layout, host_buffer(experts * layout.block_bytes).view(experts, layout.block_bytes))


@dataclass
class ExpertPool:
    """Filled while a model loads, read-only afterwards. Layers are the model's own; dense ones have no bank."""

    banks: dict[int, ExpertBank] = field(default_factory=dict)

    def add(self, layer: int, bank: ExpertBank) -> None:
        self.banks[layer] = bank

    def bank(self, layer: int) -> ExpertBank:
        return self.banks[layer]

    def expert(self, layer: int, expert: int) -> torch.Tensor:
        """View of one expert's block, uint8 [block_bytes]."""
        return self.banks[layer].blocks[expert]

    @property
    def nbytes(self) -> int:
        return sum(bank.blocks.nbytes for bank in self.banks.values())
