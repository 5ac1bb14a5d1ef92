"""Random experts as packed blocks and as float64 matrices, and the formula that both must fulfil."""

from __future__ import annotations

import torch

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import ExpertLayout, Format
from ftengine.formats.pack import pack_expert
from ftengine.formats.quantize import quantize
from ftengine.kernels.triton.buffers import Chosen

# Activations between the products are rounded to the hidden rows' type; the interpreter cuts off where a GPU rounds.
ACT = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Bank:
    """`experts` random experts in slots that are larger than their blocks."""

    def __init__(self, gate_up: Format, down: Format, hidden: int, intermediate: int, experts: int = 5) -> None:
        self.layout = ExpertLayout(hidden, intermediate, gate_up, down)
        self.plain = []
        # What lies in slots behind a block is some other layer's.
        self.blocks = torch.full((experts, self.layout.block_bytes + 4096), 0xFF, dtype=torch.uint8)
        for block in self.blocks:
            gate, up = (quantize(torch.randn(intermediate, hidden) * hidden**-0.5, gate_up) for _ in range(2))
            down_matrix = quantize(torch.randn(hidden, intermediate) * intermediate**-0.5, down)
            self.plain.append([dequantize(part).double() for part in (gate, up, down_matrix)])
            block[: self.layout.block_bytes] = pack_expert(self.layout, gate, up, down_matrix)

    def expert(self, slot: int, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.plain[slot]
        x = row.double()
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    def formula(self, x: torch.Tensor, chosen: Chosen) -> torch.Tensor:
        """float64 [T, H]."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        combine = chosen.combine.cpu().double()
        for u in range(int(chosen.count)):
            for token in combine[u, : len(x)].nonzero().flatten().tolist():
                out[token] += combine[u, token] * self.expert(int(chosen.slot[u]), x[token])
        return out


def chosen_experts(slots: int, tokens: int, top_k: int, device: str) -> Chosen:
    """Random routes of `tokens` tokens, in buffers for one token more; what lies beyond the count is nonsense."""
    chosen = Chosen.allocate(tokens + 1, top_k, device)
    chosen.combine.fill_(torch.nan)
    chosen.slot.fill_(1 << 30)
    chosen.turn.fill_(len(chosen.slot) - 1)
    routes = [torch.randperm(slots)[:top_k].tolist() for _ in range(tokens)]
    used = list(dict.fromkeys(slot for row in routes for slot in row))
    chosen.count.fill_(len(used))
    chosen.slot[: len(used)] = torch.tensor(used, dtype=torch.int32)
    chosen.ready.fill_(len(used) // 2)
    chosen.turn[: len(used)] = torch.randperm(len(used), dtype=torch.int32)
    weights = torch.rand(len(used), tokens) + 0.1
    taken = torch.tensor([[slot in row for row in routes] for slot in used])
    chosen.combine[: len(used)] = 0
    chosen.combine[: len(used), :tokens] = (weights * taken).to(device)
    return chosen


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max().clamp_min(1), f"{error}"
