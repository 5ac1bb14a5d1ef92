"""How fast this machine reads memory: the ceiling that kernels are measured against."""

from __future__ import annotations

from pathlib import Path

from ftengine import _native
from ftengine.memory.machine import cpu_name, usable_cpus
from ftengine.weights.buffer import host_buffer

LEAST_BYTES, LARGEST_CACHES = 1 << 30, 8  # what is read: so much, or so many times the last-level cache
AHEAD = (0, 2048)  # bytes fetched in advance; which is faster differs between processors
REPEATS = 5


def last_level_cache() -> int:
    """Bytes of the first processor's largest cache; 0 where the system does not tell."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdigit():
            sizes.append(int(number) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit, 1))
    return max(sizes)


def bytes_to_read() -> int:
    return max(LEAST_BYTES, LARGEST_CACHES * last_level_cache())


def read_bandwidth(threads: tuple[int, ...], size: int) -> dict[int, float]:
    """Bytes a second by number of threads, the best of some passes over a buffer of `size` bytes.

    The best, not the median: others on the machine only ever take bandwidth away, and a ceiling is what is there.
    """
    buffer = host_buffer(size)
    buffer.fill_(1)  # or every page is the system's one page of zeros
    return {
        count: size / min(_native.read_seconds(buffer, count, ahead) for ahead in AHEAD for _ in range(REPEATS))
        for count in threads
    }


def fits(size: int, available: int) -> bool:
    """Whether so many bytes can be taken and leave the system room to breathe."""
    return size <= available - min(available // 10, 1 << 30)


def processor_name() -> str:
    """As the system calls it, with the number of its CPUs that this process may use."""
    return f"{cpu_name()}, {usable_cpus()} CPUs"
