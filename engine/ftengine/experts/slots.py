"""The GPU's cache of experts: one pool of slots over all layers, each as large as the largest expert.

A slot holds one expert of one layer. `table` says which slot holds an expert, `keys` which expert a slot holds; the
kernels of ftengine.kernels.triton change both, on the device. Behind the slots stand `staging` more, for blocks that
are used once and not kept: in decode for fetched experts that no slot is given up for, in prefill for everything that
is not in a slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy
import numpy.typing
import torch
import triton.language as tl

from ftengine.experts.counts import CacheStats, cache_stats
from ftengine.experts.pool import ExpertBank
from ftengine.experts.split import TABLES, LaneCosts, forced_share, split_table, table_by_costs
from ftengine.experts.trace import Array
from ftengine.kernels.triton import cache_state as at
from ftengine.kernels.triton.buffers import DECODE_TOKENS, SlotTensors, TraceRing
from ftengine.kernels.triton.victims import choose_victims

DEFAULT_COSTS = LaneCosts(3.0, 35.0, 8.0, 26.0)  # a server's, until they are measured


class SlotPool:
    """`tensors` is what kernels take; the rest is the host's side of it.

    banks: by MoE layer, numbered 0..L-1, in host memory (pinned where `readable`). slots: that hold experts from step
    to step; with `resident` as many as there are experts, filled by `load_layer`. staging: slots for one layer's use,
    in prefill two halves that take turns; of them `ahead`, two halves as well, for prefetched experts. policy: "aged"
    or "lru" (cache_state.py). trace_steps: how many recorded steps lie on the device. Raises ValueError for numbers
    that do not fit together, torch.OutOfMemoryError.
    """

    def __init__(
        self,
        banks: Mapping[int, ExpertBank],
        slots: int,
        staging: int,
        top_k: int,
        device: torch.device | str,
        *,
        policy: str = "aged",
        resident: bool = False,
        readable: bool = True,
        trace_steps: int = 0,
        ahead: int = 0,
        costs: LaneCosts = DEFAULT_COSTS,
    ) -> None:
        if policy not in at.POLICIES:
            raise ValueError(f"no policy of the expert cache is called {policy!r}; there are {', '.join(at.POLICIES)}")
        if slots < 0 or not 0 <= ahead <= staging:
            raise ValueError(f"an expert cache of {slots} slots and {staging} staging slots is not possible")
        if sorted(banks) != list(range(len(banks))) or not banks:
            raise ValueError("MoE layers are numbered 0, 1, 2, ...")
        self.layers, self.experts = len(banks), banks[0].experts
        if any(bank.experts != self.experts for bank in banks.values()):
            raise ValueError("all MoE layers have the same number of experts")
        self.block_bytes = tuple(banks[layer].layout.block_bytes for layer in range(self.layers))
        whole = self.layers * self.experts
        slots, staging, ahead = (whole, 0, 0) if resident else (min(slots, whole), staging, ahead)
        self.top_k = top_k
        self.tensors = _allocate(
            (self.layers, self.experts), slots, staging, ahead, max(self.block_bytes), torch.device(device),
            at.POLICIES[policy], resident, readable, top_k,
            _ring(trace_steps, self.layers, self.experts, top_k, device) if trace_steps else None,
        )  # fmt: skip
        self._control = torch.zeros(at.CONTROL_SIZE)
        self._control[at.GATE.value] = 1.0
        self._control[at.BUDGET.value] = 1.0
        self._send(self.tensors.control, self._control)
        self.cpu_share: float | None = None  # fixed, of the missing experts
        self.set_costs(costs)
        choose_victims(self.tensors)

    def load_layer(self, moe_index: int, bank: ExpertBank) -> None:
        """`resident`: copies a layer's experts to their slots."""
        first = moe_index * self.experts
        self.tensors.blocks[first : first + self.experts, : bank.blocks.shape[1]].copy_(bank.blocks)

    def set_costs(self, costs: LaneCosts) -> None:
        """What the split of missing experts reckons with, from the next step on."""
        self.costs = costs
        if self.cpu_share is None:
            self.set_split(table_by_costs(costs, DECODE_TOKENS, self.top_k))

    def set_cpu_share(self, share: float | None) -> None:
        """A fixed share of each layer's missing experts for the CPU, 0..1; None: by the lanes' costs."""
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"a share is 0 to 1, not {share}")
        self.cpu_share = share
        if share is None:
            self.set_costs(self.costs)
        else:
            self.set_split(split_table(DECODE_TOKENS, self.top_k, lambda rows, misses: forced_share(misses, share)))

    def set_split(self, table: numpy.typing.NDArray[numpy.int16]) -> None:
        """What `split_table` made for DECODE_TOKENS rows, from the next step on. Waits for nothing."""
        self._send(self.tensors.split, torch.from_numpy(table))

    def set_trials(self, layers: int) -> None:
        """From one trial of another split to the next; 0: none."""
        self._set({at.TRIES: layers})

    def set_gate(self, gated: bool) -> None:
        """Whether a fetched expert has to score higher than what it replaces; if not, it is used once from staging."""
        self._set({at.GATE: float(gated)})

    def set_background(self, experts: float) -> None:
        """How many experts that the CPU computed may be copied into slots in the background, a layer of a step.

        At most ADMIT_MAX; 0.25: one in every fourth layer; 0: none.
        """
        if not 0 <= experts <= at.ADMIT_MAX.value:
            raise ValueError(f"0 to {at.ADMIT_MAX.value} experts a layer can be copied in the background")
        self._set({at.BUDGET: experts})

    def set_prefetch(self, experts: int) -> None:
        """How many experts may be copied into slots before their layer begins (kernels/triton/prefetch.py), a layer of
        a step; at most PREFETCH_MAX.
        """
        if not 0 <= experts <= at.PREFETCH_MAX.value:
            raise ValueError(f"0 to {at.PREFETCH_MAX.value} experts can be prefetched for a layer")
        self._set({at.PREFETCH_MOST: experts})

    @property
    def prefetch(self) -> int:
        """See `set_prefetch`."""
        return int(self._control[at.PREFETCH_MOST.value])

    def _set(self, values: Mapping[tl.constexpr, float]) -> None:
        for place, value in values.items():
            self._control[place.value] = value
        self._send(self.tensors.control, self._control)

    @property
    def background(self) -> float:
        """See `set_background`."""
        return float(self._control[at.BUDGET.value])

    @staticmethod
    def _send(target: torch.Tensor, source: torch.Tensor) -> None:
        """In the order of the stream; later changes of `source` do not matter."""
        if target.device.type == "cuda":  # torch keeps pinned memory until what copies from it is done
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)

    def stats(self) -> CacheStats:
        """Waits for the device; never call it within a step that is being captured."""
        return cache_stats(self.tensors.counters.cpu(), self.block_bytes)

    def start_trace(self) -> None:
        """Records the first row of each decode step from now on, also of steps whose graphs were captured before."""
        if self.tensors.trace is None:
            raise ValueError("this expert cache was made without room for a trace")
        self.tensors.state[at.TRACED.value] = 0
        self._set({at.TRACE: 1.0})

    def stop_trace(self) -> None:
        self._set({at.TRACE: 0.0})

    def traced(self) -> int:
        """Steps recorded since `start_trace`. Waits for the device."""
        return int(self.tensors.state[at.TRACED.value])

    def trace_of(self, start: int, end: int) -> tuple[Array, Array]:
        """ids int16 [N, L, K] and logits float16 [N, L, E] of the steps start..end - 1 after `start_trace`.

        They must be among the last `trace_steps` that were recorded. Waits for the device.
        """
        ring = self.tensors.trace
        assert ring is not None, "nothing was recorded"
        order = torch.arange(start, end) % len(ring.ids)
        return ring.ids.cpu()[order].numpy(), ring.logits.cpu()[order].numpy()


def _allocate(
    shape: tuple[int, int],
    slots: int,
    staging: int,
    ahead: int,
    slot_bytes: int,
    device: torch.device,
    policy: int,
    resident: bool,
    readable: bool,
    top_k: int,
    trace: TraceRing | None,
) -> SlotTensors:
    def full(value: float, dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.full(size, value, dtype=dtype, device=device)

    layers, experts = shape
    entries = 1 if resident else max(1, slots)
    return SlotTensors(
        blocks=torch.empty(max(1, slots + staging), slot_bytes, dtype=torch.uint8, device=device),
        slots=slots,
        staging=staging,
        ahead=ahead,
        table=full(-1, torch.int32, *shape),
        keys=full(-1, torch.int32, entries),
        stamp=full(-1, torch.int32, entries),
        score=full(-math.inf, torch.float32, *shape),
        queue=full(0, torch.int32, entries),
        queue_score=full(-math.inf, torch.float32, entries),
        admit=full(0, torch.int32, layers, at.ADMIT_SIZE.value),
        prefetch=full(-1, torch.int32, layers, at.PREFETCH_SIZE.value),
        control=full(0, torch.float32, at.CONTROL_SIZE),
        counters=full(0, torch.int64, layers, at.COUNTERS.value),
        state=full(0, torch.int32, at.STATE_SIZE),
        row_scratch=full(0, torch.float32, DECODE_TOKENS, experts),
        split=full(0, torch.int16, TABLES, DECODE_TOKENS, DECODE_TOKENS * top_k + 1),
        record=full(0, torch.int32, at.RECORDED.value, layers, at.RECORD.value),
        policy=policy,
        resident=resident,
        readable=readable,
        trace=trace,
    )


def _ring(steps: int, layers: int, experts: int, top_k: int, device: torch.device | str) -> TraceRing:
    return TraceRing(
        torch.zeros(steps, layers, top_k, dtype=torch.int16, device=device),
        torch.zeros(steps, layers, experts, dtype=torch.float16, device=device),
    )
