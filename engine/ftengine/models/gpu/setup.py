"""What a loaded model is to be prepared for: the engine process works it out from the budget and the strategy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from ftengine import switches
from ftengine.experts.split import LaneCosts
from ftengine.kernels.triton.buffers import DECODE_TOKENS
from ftengine.models.gpu.strategy import PREFETCH, Strategy

TRACE_STEPS = 32  # 0.7 MB for a model in the shape of Qwen3.6-35B-A3B; a recording empties the ring as it fills


@dataclass(frozen=True)
class GpuSetup:
    """strategy: where routed experts are computed in a decode step.

    resident: every expert has a slot; offload: what has none is fetched; cpu: there are no slots, the CPU computes
    all; hybrid: what has no slot is split between link and CPU. In a step with prefill the GPU computes all.
    """

    strategy: Strategy
    max_running: int  # sequences
    context: int  # tokens of a sequence
    page_size: int
    slots: int = 0  # experts that stay from step to step; of no meaning when resident
    staging: int = 0  # experts that are there for one layer
    threads: int = 1  # of the CPU's lane
    trace_steps: int = TRACE_STEPS  # of routing that lie on the GPU while they are recorded; 0: none can be
    readable: bool = True  # the GPU can read the experts in host memory: they are pinned
    branches: bool = True  # the shared expert is computed beside the lookup
    prefetch: int = PREFETCH  # experts copied before their layer begins, at most; 0: none
    policy: str = switches.POLICIES[0]  # which expert gives its slot up (kernels/triton/cache_state.py)
    costs: LaneCosts | None = None  # of the two lanes at the same time, where they were measured
    # `hybrid`: whether steps leave the CPU's lane alone where that is found to be faster (experts/rest.py); `at first`:
    # those of one sequence begin so
    rest: Literal["never", "where faster", "at first"] = "never"

    @property
    def decode_tokens(self) -> int:
        """Sequences of the largest decode step that has a graph."""
        return min(self.max_running, DECODE_TOKENS)

    @property
    def uses_cpu(self) -> bool:
        return self.strategy in ("cpu", "hybrid")


def prefetch_asked_for() -> int:
    """FT_PREFETCH, for measurements: GpuSetup.prefetch. Raises ConfigError."""
    return switches.prefetch(os.environ.get("FT_PREFETCH", str(PREFETCH)))


def policy_asked_for() -> str:
    """FT_CACHE_POLICY, for measurements: GpuSetup.policy. Raises ConfigError."""
    return switches.policy(os.environ.get("FT_CACHE_POLICY", switches.POLICIES[0]))
