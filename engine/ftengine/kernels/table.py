"""Picks the implementation of each kernel, by what was measured.

The native kernel reads each expert once and so wins while few tokens share one; torch's matrix products win once
an expert has rows enough to be bound by arithmetic, in bfloat16 (oneDNN) long before float32. Limits are the
crossing points on an AVX-512 machine with two cores, 4 to 64 experts of 2.6 to 4.7 million weights.
"""

from __future__ import annotations

import torch

from ftengine.kernels import native, reference

# dtype -> routes per expert of the bank up to which the native kernel is used
NATIVE_LIMIT = {torch.float32: 64, torch.bfloat16: 4}
NATIVE = native.AVAILABLE and native.instruction_sets()[:1] != ["portable"]


def moe_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Adds the routed experts' weighted outputs to `out`; shapes and dtypes as in kernels/reference.py."""
    threads = torch.get_num_threads()
    if NATIVE and expert_ids.numel() <= NATIVE_LIMIT.get(gate_up.dtype, 0) * gate_up.shape[0]:
        native.moe_experts(hidden, expert_ids, weights, gate_up, down, out, threads=threads)
    else:
        reference.moe_experts(hidden, expert_ids, weights, gate_up, down, out, threads)
