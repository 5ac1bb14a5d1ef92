"""Plain torch kernels: what every other implementation is compared with, and what runs where there is none."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def moe_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    threads: int = 0,
) -> None:
    """Adds the routed experts' weighted outputs to `out`, in place.

    out[t] += sum_k weights[t, k] * down[e] @ (silu(gate[e] @ hidden[t]) * (up[e] @ hidden[t])), e = expert_ids[t, k]

    hidden [T, H]; expert_ids [T, K] integer, negative entries are skipped; weights [T, K] float32;
    gate_up [E, 2I, H], gate's rows first, and down [E, H, I], in hidden's dtype; out [T, H] float32.
    threads: unused, torch's own setting counts.
    """
    tokens, top_k = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    rows = order.div(top_k, rounding_mode="floor")
    route_weights = weights.reshape(-1)[order].unsqueeze(1)
    start = 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        routes = slice(start, start + count)
        start += count
        if expert < 0:
            continue
        picked = rows[routes]
        states = hidden if tokens == 1 else hidden.index_select(0, picked)
        gate, up = F.linear(states, gate_up[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate).mul_(up), down[expert])
        out.index_add_(0, picked, result.to(out.dtype).mul_(route_weights[routes]))
