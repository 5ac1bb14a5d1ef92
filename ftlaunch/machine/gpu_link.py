"""What crosses the link to the GPU: a copy of pinned memory, the engine's own gather, and the CPU at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

from ftengine.memory.folders import use_kernel_cache
from ftengine.memory.machine import available_memory
from ftengine.memory.plan import default_lane_threads
from ftlaunch.machine import pci
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.system import System
from ftlaunch.machine.verdict import Finding, gib, rate

COPY_BYTES, LEAST_COPY, COPIES = 256 << 20, 1 << 20, 5
LOW_COPY = 0.7  # of what the link can carry
EXPERTS = 8  # of a layer, the most that the engine's own measurement takes
LANE_BYTES = 1 << 30  # of host memory, for a layer of experts and what measuring it takes


def probe(asked: Asked) -> Iterator[Finding]:
    gpu = asked.known.get("gpu.use", {})
    if not gpu.get("usable"):
        return
    size = _copy_bytes(gpu.get("free") or 0)
    if not size:
        yield _not_measured("gpu.pinned", "pinned copy", "there is no memory left for it")
        return
    yield pinned(size)
    if available_memory()[0] < 2 * LANE_BYTES:
        yield _not_measured("gpu.gather", "gather", f"less than {gib(2 * LANE_BYTES)} of memory are free")
        return
    yield from lanes()


def copy_rate() -> float | None:
    """Bytes a second of `pinned`, None where there is no memory left for it."""
    import torch

    size = _copy_bytes(torch.cuda.mem_get_info()[0])
    return float(pinned(size).data["bytes_per_second"]) if size else None


def _copy_bytes(free: int) -> int:
    """free: bytes of the GPU. 0 where it is too little."""
    size = min(COPY_BYTES, free // 8, available_memory()[0] // 8)
    return size if size >= LEAST_COPY else 0


def pinned(size: int) -> Finding:
    """Of the first GPU that CUDA shows. The link is looked at while copies are on their way: it wakes up for them."""
    import torch

    source = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    measured, seen = 0.0, None
    for _ in range(2):  # the first wakes the link up
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(COPIES + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            target.copy_(source, non_blocking=True)
            mark.record()
        seen = pci.link(System(), _address()) or seen
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) for before, after in pairwise(marks)]
        measured = max(measured, size / min(times) * 1e3)
    return judged(measured, seen)


def judged(measured: float, link: pci.Link | None) -> Finding:
    """link: while it was copied."""
    data: dict[str, Any] = {"bytes_per_second": measured, "link": None if link is None else link.data()}
    if link is None:
        return Finding("gpu.pinned", "pinned copy", f"{rate(measured)} to the GPU", data=data)
    value = f"{rate(measured)} to the GPU, over PCIe {link.generation} x{link.width}"
    if link.generation < min(link.most_generation, link.slot_generation or link.most_generation):
        cost = f"the link stays at generation {link.generation} under load, {rate(link.best)} would be possible"
        mend = "set the slot's PCIe generation to auto in the firmware's setup; seat the card anew, without a riser"
        return Finding("gpu.pinned", "pinned copy", value, "warn", cost, mend, data)
    if measured < LOW_COPY * link.best:
        cost = f"{measured / link.best:.0%} of what that link carries"
        mend = "end what else copies to the GPU or reads memory, and run it again"
        return Finding("gpu.pinned", "pinned copy", value, "warn", cost, mend, data)
    return Finding("gpu.pinned", "pinned copy", value, data=data)


def lanes() -> Iterator[Finding]:
    """Experts of Qwen3.6-35B-A3B in NVFP4: over the link alone, on the CPU alone, both at once."""
    use_kernel_cache()
    import torch

    from ftengine.bench.lanes import bank_that_fits, pinned_bank
    from ftengine.bench.layer import Shape
    from ftengine.experts.probe import LaneProbe
    from ftengine.formats.format import FORMATS

    torch.set_num_threads(1)
    bank = bank_that_fits(Shape().layout(FORMATS["nvfp4"]))
    threads = default_lane_threads().value  # a server's, or it could not use the figures
    with pinned_bank(bank, "cuda") as refused:
        if refused:
            cost = "nothing crosses the link: the CPU computes all experts without a slot"
            mend = "ulimit -l unlimited; on WSL 2 memory= in .wslconfig"
            yield Finding("gpu.gather", "gather", refused, "warn", cost, mend, {"bytes_per_second": None})
            return
        with closing(LaneProbe([bank], threads, torch.bfloat16, "cuda")) as probe:
            yield from of_lanes(probe, bank.layout.used_bytes, threads)


def of_lanes(probe: Any, expert: int, threads: int) -> Iterator[Finding]:
    """probe: a LaneProbe; expert: bytes that one of its experts reads."""
    count = min(EXPERTS, probe.most)
    link = count * expert / probe.link(count) * 1e6
    yield Finding(
        "gpu.gather", "gather", f"{rate(link)} by a kernel", data={"bytes_per_second": link, "experts": count}
    )
    cpu, both = count * expert / probe.cpu(count) * 1e6, probe.both(count, count)
    together = count * expert * (1 / both.link + 1 / both.cpu) * 1e6
    data = {
        "cpu_bytes_per_second": cpu,
        "together_bytes_per_second": together,
        "threads": threads,
        "handshake_us": probe.handshake(),
        "ratio": min(1.0, link / together),
    }
    value = f"CPU {rate(cpu)} with {threads} threads, link and CPU together {rate(together)}"
    yield Finding("gpu.lanes", "both lanes", value, data=data)


def _address() -> str:
    import torch

    properties = torch.cuda.get_device_properties(0)
    domain, bus, device = (getattr(properties, f"pci_{name}_id", 0) for name in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _not_measured(id: str, label: str, reason: str) -> Finding:
    return Finding(id, label, f"not measured: {reason}", "note", data={"bytes_per_second": None})
