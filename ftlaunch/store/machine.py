"""The memory that a model may fill on this machine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SECONDS = 5.0


@dataclass(frozen=True)
class Machine:
    """bytes. vram: of the largest NVIDIA GPU; 0 without one."""

    ram: int
    ram_limit: str  # what sets that bound
    vram: int = 0
    gpu: str = ""


def this_machine() -> Machine:
    import psutil

    from ftengine.memory.machine import cgroup_memory

    ram, limit = int(psutil.virtual_memory().total), "of RAM"
    allowed = cgroup_memory()
    if allowed is not None and allowed < ram:
        ram, limit = allowed, "that its cgroup allows"
    gpu, vram = _largest_gpu()
    return Machine(ram, limit, vram, gpu)


def _largest_gpu() -> tuple[str, int]:
    """Asked of the driver's own tool: a machine without it has no GPU that could be used."""
    try:
        told = subprocess.run(QUERY, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return "", 0
    found = []
    for line in told.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdigit():
            found.append((int(mebibytes) << 20, name.strip()))
    vram, name = max(found, default=(0, ""))
    return name, vram
