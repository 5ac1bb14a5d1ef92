"""A small expert cache whose blocks can be told apart, and its parts, for tests."""

from __future__ import annotations

import torch

from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.formats.format import BF16, ExpertLayout
from ftengine.kernels.triton.buffers import Mailbox

HIDDEN = 32
LAYOUT = ExpertLayout(HIDDEN, 16, BF16, BF16)


def make_banks(layers: int, experts: int, device: str) -> dict[int, ExpertBank]:
    """Every block holds the number of its layer and expert in each int32."""
    banks = {}
    for layer in range(layers):
        words = torch.arange(experts, dtype=torch.int32)[:, None] + layer * experts
        blocks = words.expand(experts, LAYOUT.block_bytes // 4).contiguous().view(torch.uint8)
        banks[layer] = ExpertBank(LAYOUT, blocks.pin_memory() if device == "cuda" else blocks)
    return banks


def held_by(pool: SlotPool, slot: int) -> int:
    """layer * E + expert of the block that lies in a slot; -1 where it is of several."""
    words = pool.tensors.blocks[slot].view(torch.int32)
    return int(words[0]) if bool((words == words[0]).all()) else -1


def make_mailbox(tokens: int, top_k: int, device: str, dtype: torch.dtype = torch.float32) -> Mailbox:
    size = Mailbox.size(tokens, top_k, HIDDEN, dtype)
    buffer = torch.zeros(size, dtype=torch.uint8)
    return Mailbox.carve(buffer.pin_memory() if device == "cuda" else buffer, tokens, top_k, HIDDEN, dtype)
