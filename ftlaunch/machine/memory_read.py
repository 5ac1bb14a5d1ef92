"""How fast memory is read by all threads together, with the engine's own loop, against what its modules can do."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator

from ftengine.kernels import native
from ftengine.memory.machine import available_memory
from ftlaunch.machine import modules
from ftlaunch.machine.caches import last_level
from ftlaunch.machine.computing import Computing, Watch
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.system import System
from ftlaunch.machine.verdict import Finding, gib, rate

WANTED, LEAST = 512 << 20, 4  # bytes that are read; times the largest cache that they must be at the least
AHEAD = (0, 2048)  # bytes fetched in advance; which is faster differs between processors
SHORT, SHORT_MOST = 128 << 20, 512 << 20  # bytes, where there is little time
SECONDS, PASSES = 0.8, 5  # of one kind of pass
FILL_SECONDS = 1.0
LOW = 0.5  # of what the modules can do: two threads of a fast CPU reach that on two channels
ROW = b"\1" * (1 << 20)


def probe(asked: Asked) -> Iterator[Finding]:
    from ftlaunch.servers import running

    yield read(System(), *available_memory(), Watch(os.getppid(), running()))


def read(system: System, available: int, bound: str, watch: Watch | None = None) -> Finding:
    """available: bytes, and `bound` says what sets them. watch: tells who else computed meanwhile."""
    peak = modules.peak(modules.modules(system))
    data = {"bytes_per_second": None, "threads": native.granted_threads(), "peak_bytes_per_second": peak}
    if not native.AVAILABLE:
        return Finding("memory.read", "reading", f"not measured: {native.REASON}", "note", data=data)
    measured, size = measure(system, available)
    if measured is None:
        reason = f"not measured: {gib(available)} are free ({bound})"
        return Finding("memory.read", "reading", reason, "note", "", "close other programs, and run it again", data)
    meanwhile = Computing() if watch is None else watch.seen()
    data |= {"bytes_per_second": measured, "bytes": size}
    value = f"{rate(measured)} with {data['threads']} threads"
    if peak is not None:
        value += f", {measured / peak:.0%} of what the modules can do"
    finding = Finding("memory.read", "reading", value, data=data)
    if who := meanwhile.who():
        mend = "end them, and run it again" if meanwhile.others_busy else "wait until it has answered, and run it again"
        return finding.but("note", f"computed meanwhile: {who}; it may be more", mend)
    if peak is None or measured >= LOW * peak:
        return finding
    cost = f"experts on the CPU have {rate(measured)} of {rate(peak)}"
    mend = "use more CPUs; on several NUMA nodes try numactl --interleave all"
    return finding.but("note", cost, mend)


def measure(system: System, available: int) -> tuple[float | None, int]:
    """Bytes a second that all threads read, and of how many bytes; None where too few are free."""
    cache = last_level(system)
    size = min(max(WANTED, 8 * cache), available // 4) >> 20 << 20
    if size < max(LEAST * cache, len(ROW)):
        return None, 0
    buffer = filled(size, LEAST * cache)
    return bandwidth(buffer, native.granted_threads()), len(buffer)


def short(threads: int | None = None) -> float | None:
    """Bytes a second, in about half a second; None where there is no native library or too little memory.

    threads: None for all.
    """
    available, _ = available_memory()
    size = min(max(SHORT, 2 * last_level(System())), SHORT_MOST, available // 4) >> 20 << 20
    if not native.AVAILABLE or not size:
        return None
    return bandwidth(filled(size, min(size, SHORT // 2), 0.3), threads or native.granted_threads(), 0.1)


def bandwidth(buffer: memoryview, threads: int, seconds: float | None = None) -> float:
    """Bytes a second, the best of several passes over all of it: others only ever take some away."""
    from ftengine import _native

    best = float("inf")
    for ahead in AHEAD:
        began = time.monotonic()
        for _ in range(PASSES):
            start = time.perf_counter()
            _native.read_seconds(buffer, threads, ahead)
            best = min(best, time.perf_counter() - start)
            if time.monotonic() - began > (SECONDS if seconds is None else seconds):
                break
    return len(buffer) / best


def filled(size: int, least: int, seconds: float | None = None) -> memoryview:
    """Memory in large pages, of `size` bytes. Of fewer, but `least`, where the system takes long to clear large pages:
    it moves others out of the way first.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):  # a kernel without them
        pass
    began = time.monotonic()
    for at in range(0, size, len(ROW)):  # or every page is the system's one page of zeros
        if at >= least and time.monotonic() - began > (FILL_SECONDS if seconds is None else seconds):
            return memoryview(memory)[:at]
        memory[at : at + len(ROW)] = ROW
    return memoryview(memory)
