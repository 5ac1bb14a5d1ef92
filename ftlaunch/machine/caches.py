"""The processor's caches."""

from __future__ import annotations

from ftlaunch.machine.system import System

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level(system: System) -> int:
    """Bytes of the first processor's largest cache; 0 where the system does not tell."""
    sizes = [0]
    for path in system.names("sys/devices/system/cpu/cpu0/cache", "index*/size"):
        text = system.text(path)
        number = text.rstrip("KMG")
        if number.isdecimal():
            sizes.append(int(number) * UNITS.get(text[-1:], 1))
    return max(sizes)
