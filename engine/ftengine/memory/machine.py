"""What this machine lets the process use: CPUs, CPU features, memory; limits of its cgroups included. Torch-free."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
ADDRESS_LIMIT, NO_ADDRESS_LIMIT = "ulimit -v", "ulimit -v unlimited"  # what sets a bound, and what takes it away
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


def cpu_flags() -> frozenset[str]:
    """The first processor's feature flags; empty where the system does not list them."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_name(cpuinfo: str | None = None) -> str:
    """As the system calls the processor, "x86_64" where it has no name for it. cpuinfo: /proc/cpuinfo's text, None to
    read it. What is measured of a machine is kept under this name, by one program for another.
    """
    text = _read(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo
    found = re.search(r"^(?:model name|Model)[ \t]*:[ \t]*(\S.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def usable_cpus() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_cpus(root: Path = CGROUP_ROOT, membership: str | None = None) -> int | None:
    """CPUs of time that the tightest of this process's cgroups allows, rounded up; None without a limit."""
    limits = []
    for folder in _folders(root, "cpu", membership):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us").strip(),
            _read(folder / "cpu.cfs_period_us").strip(),
        ]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            limits.append(math.ceil(int(words[0]) / int(words[1])))
    return max(1, min(limits)) if limits else None


def cgroup_memory(root: Path = CGROUP_ROOT, membership: str | None = None) -> int | None:
    """Bytes the tightest of this process's cgroups still allows; None without a limit.

    Page cache that the kernel can drop (inactive_file) counts as free.
    """
    rooms = []
    for folder in _folders(root, "memory", membership):
        for limit_name, usage_name, key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
            if limit.isdigit() and usage.isdigit() and int(limit) < UNLIMITED:
                statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if " " in line)
                rooms.append(max(0, int(limit) - int(usage) + int(statistics.get(key, 0))))
    return min(rooms) if rooms else None


def available_memory() -> tuple[int, str]:
    """Bytes that can be allocated now without swapping, and what sets that bound."""
    import psutil

    bounds = [(int(psutil.virtual_memory().available), "free memory of the machine")]
    if (limit := cgroup_memory()) is not None:
        bounds.append((limit, "memory limit of the cgroup"))
    if (addresses := address_limit()) is not None:
        bounds.append((max(0, addresses - int(psutil.Process().memory_info().vms)), ADDRESS_LIMIT))
    return min(bounds, key=lambda bound: bound[0])


def address_limit() -> int | None:
    """Bytes that this process may map altogether; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _folders(root: Path, controller: str, membership: str | None) -> Iterator[Path]:
    """The folders of this process's cgroup and its parents: v2 (also beside v1, as `unified`) and v1's `controller`."""
    text = _read(Path("/proc/self/cgroup")) if membership is None else membership
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / controllers, root / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in mounts:
            for depth in range(len(parts) + 1):
                yield mount.joinpath(*parts[:depth])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
