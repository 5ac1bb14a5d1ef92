"""What the time of decode steps goes into, from the kernels that a profiler saw. Torch is imported where it is used.

Kernels run side by side: the shared expert beside the lookup, copies beside everything. So a part has two figures, all
that its kernels took and the time in which no other part's ran; what remains of a step is time of several parts at once
and time of none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

OTHER = "other"
# part -> what the names of its kernels contain; the first that fits
PARTS = {
    "attention": ("_attend", "_combine", "_prepare_heads"),
    "Gated DeltaNet": ("_delta", "_conv", "chunk_", "recompute_w_u", "solve_tril", "_gated_norm", "_keep_states"),
    "router and lookup": ("_route", "_plan", "_slots_for_round", "_seed", "order_routes"),
    "cache, between steps": ("_end_step", "_queue_slots"),
    "prefetching: the choice": ("_choose",),
    "copy over the link": ("_copy",),
    "wait for the CPU": ("_join",),
    "experts": ("gate_up", "down_", "expert", "_grouped"),
    "sampling": ("_draw", "_scan", "_gather", "_hand_on", "argmax", "softmax", "sort"),
    "dense products": ("gemv", "skinny", "gemm", "cutlass", "nvjet", "_dequantize"),
    "norms, embedding, activations": ("_rms_norm", "_swiglu", "_gated_swiglu", "_rows"),
}


@dataclass(frozen=True)
class Ran:
    """A kernel's run. Microseconds, of any clock that all of them share."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Part:
    """Microseconds a step: of all of its kernels added, and while no other part's ran."""

    busy: float
    alone: float


@dataclass(frozen=True)
class StepParts:
    """Microseconds a step. step = what each part has alone + together + idle."""

    step: float
    parts: dict[str, Part]
    together: float  # several parts at once
    idle: float  # none

    def lines(self) -> list[str]:
        """For the terminal, the parts that take longest first."""
        ordered = sorted(self.parts.items(), key=lambda item: -item[1].busy)
        rows = [("part", "all, us", "alone, us"), *((n, f"{p.busy:.0f}", f"{p.alone:.0f}") for n, p in ordered)]
        rows += [("several at once", "", f"{self.together:.0f}"), ("idle", "", f"{self.idle:.0f}")]
        rows += [("step", "", f"{self.step:.0f}")]
        return [f"    {name:30}{busy:>9}{alone:>11}" for name, busy, alone in rows]


def part_of(kernel: str) -> str:
    """Of PARTS, or OTHER."""
    lowered = kernel.lower()
    return next((part for part, names in PARTS.items() if any(name in lowered for name in names)), OTHER)


def divide(kernels: Iterable[Ran], steps: int) -> StepParts:
    """kernels: of so many whole steps one after the other, in any order. Raises ValueError where there are none."""
    events: list[tuple[float, int, str]] = []
    busy: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        part = part_of(kernel.name)
        events += [(kernel.start, 1, part), (kernel.end, -1, part)]
        busy[part] += kernel.end - kernel.start
    if not events or steps < 1:
        raise ValueError("no kernel was seen in these steps")
    events.sort()
    alone: dict[str, float] = defaultdict(float)
    running: dict[str, int] = defaultdict(int)
    together = idle = 0.0
    before = first = events[0][0]
    for time, change, part in events:
        active = [name for name, count in running.items() if count]
        if not active:
            idle += time - before
        elif len(active) == 1:
            alone[active[0]] += time - before
        else:
            together += time - before
        running[part] += change
        before = time
    found = {part: Part(spent / steps, alone[part] / steps) for part, spent in busy.items()}
    return StepParts((before - first) / steps, found, together / steps, idle / steps)


def seen(work: Callable[[], object]) -> list[Ran]:
    """The kernels, copies and fills of the GPU, as torch's profiler has them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return [
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
