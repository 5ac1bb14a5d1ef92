"""The memory that a model may fill on this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """bytes. Of GPUs the doctor's probes tell (ftlaunch/machine/gpu.py), which a driver that hangs does not hold up."""

    ram: int
    ram_limit: str  # what sets that bound


def this_machine() -> Machine:
    import psutil

    from ftengine.memory.machine import cgroup_memory

    ram, limit = int(psutil.virtual_memory().total), "of RAM"
    allowed = cgroup_memory()
    if allowed is not None and allowed < ram:
        ram, limit = allowed, "that its cgroup allows"
    return Machine(ram, limit)
