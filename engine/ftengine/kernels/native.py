"""The native (C++) kernels, for torch tensors.

Imports no torch: the front and `ft doctor` ask `AVAILABLE` and `cpu_features` too. Which kernel is used for which
shape is decided by the table in this package, not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from ftengine import _native
except ImportError as error:
    REASON = f"the native library is not built ({error})"
    AVAILABLE = False
else:
    REASON = ""
    AVAILABLE = True

if TYPE_CHECKING:
    import torch


def cpu_features() -> list[str]:
    """Names of the instruction sets that processor and operating system offer; empty without the native library."""
    return _native.cpu_features() if AVAILABLE else []


def instruction_sets() -> list[str]:
    """Versions of the kernels that run here, the one used by default first: "avx512", "avx2", "portable"."""
    return _native.instruction_sets() if AVAILABLE else []


def moe_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    threads: int = 0,
    isa: str = "",
) -> None:
    """Add the routed experts' weighted outputs to `out`, in place.

    out[t] += sum_k weights[t, k] * down[e] @ (silu(gate[e] @ hidden[t]) * (up[e] @ hidden[t])), e = expert_ids[t, k]

    Sums are float32; the result does not depend on `threads`, in its last bits it depends on `isa`.

    Args:
        hidden: [T, H] float32 or bfloat16.
        expert_ids: [T, K] int32 or int64. A negative id is a route that is not taken.
        weights: [T, K] float32.
        gate_up: [E, 2I, H] float32 or bfloat16, the gate's rows first.
        down: [E, H, I], of gate_up's dtype.
        out: [T, H] float32. All tensors are contiguous and on the CPU, none of them requires a gradient.
        threads: at most so many, the caller's included; 0 for torch's own setting.
        isa: one of `instruction_sets()`; empty for the first.

    Raises:
        ValueError: an expert id >= E, shapes that do not fit together, an isa that does not run here.
        TypeError: a dtype, layout or device that is not taken.
    """
    if threads == 0:
        import torch

        threads = torch.get_num_threads()
    _native.moe_experts(hidden, expert_ids, weights, gate_up, down, out, threads, isa)
