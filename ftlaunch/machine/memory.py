"""Memory: how much there is and who limits it, its modules, swap, large pages, and whether it is short now."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftengine.memory.machine import cgroup_memory
from ftlaunch.machine import modules
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.system import System
from ftlaunch.machine.verdict import Finding, gib

GIB = 1 << 30
DEMO, SMALL = GIB, 8 * GIB  # free memory that the demo model needs; with less than that no model of use is served
CLOSE = "close other programs: ps aux --sort -rss"
SHORT = 10.0  # percent of time in which some process waited for memory


def probe(asked: Asked) -> Iterator[Finding]:
    system = System()
    yield size(system)
    yield modules.modules_finding(system)
    yield swap(system)
    yield pages(system)
    yield pressure(system)


def size(system: System) -> Finding:
    table = _table(system)
    total, free = table["MemTotal"], table["MemAvailable"]
    limit = cgroup_memory(system.path("sys/fs/cgroup"), system.text("proc/self/cgroup"))
    usable = free if limit is None else min(free, limit)
    data = {"total": total, "available": free, "cgroup_available": limit, "usable": usable}
    value = f"{gib(total)}, {gib(free)} available"
    limited = limit is not None and limit < free
    if limited:
        value = f"{gib(total)}, of which the cgroup still allows {gib(usable)}"
    finding = Finding("memory.size", "size", value, data=data)
    if usable >= SMALL:
        return finding.but("note") if limited else finding
    mend = CLOSE
    if limited:
        mend = "raise the limit: docker run --memory, systemd MemoryMax="
    elif system.wsl:
        mend += ", or raise memory= in .wslconfig, then wsl --shutdown"
    return (
        finding.but("bad", "no model fits", mend)
        if usable < DEMO
        else finding.but("warn", "only small models fit", mend)
    )


def swap(system: System) -> Finding:
    table = _table(system)
    total = table.get("SwapTotal", 0)
    used = total - table.get("SwapFree", 0)
    data = {"total": total, "used": used}
    if not total:
        return Finding("memory.swap", "swap", "none", data=data)
    value = f"{gib(used)} of {gib(total)} used"
    if used <= table["MemTotal"] // 8:
        return Finding("memory.swap", "swap", value, data=data)
    cost = "memory was short: what is swapped out comes back from the disk, in the middle of an answer"
    return Finding("memory.swap", "swap", value, "warn", cost, CLOSE, data)


def pages(system: System) -> Finding:
    """Large ones: transparent, which weights are asked to lie in, and reserved, which nobody else can use."""
    words = system.text("sys/kernel/mm/transparent_hugepage/enabled")
    mode = re.search(r"\[(\w+)\]", words)
    table = _table(system)
    idle = table.get("HugePages_Free", 0) * table.get("Hugepagesize", 0)
    data = {"transparent": mode.group(1) if mode else None, "reserved_unused": idle}
    value = f"transparent: {mode.group(1)}" if mode else "not told by the system"
    if idle >= GIB:
        cost = f"{gib(idle)} are reserved as huge pages that nobody uses"
        return Finding("memory.pages", "huge pages", value, "warn", cost, "sudo sysctl vm.nr_hugepages=0", data)
    if mode and mode.group(1) == "never":
        cost = "weights lie in pages of 4 KiB: loading and pinning them takes longer"
        mend = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("memory.pages", "huge pages", value, "note", cost, mend, data)
    return Finding("memory.pages", "huge pages", value, data=data)


def pressure(system: System) -> Finding:
    """Documentation/accounting/psi.rst of the kernel."""
    found = re.search(r"^some avg10=([\d.]+)", system.text("proc/pressure/memory"), re.MULTILINE)
    if found is None:
        return Finding("memory.pressure", "pressure", "not told by the system", data={"waiting_percent": None})
    share = float(found.group(1))
    value, data = f"{share:.1f} % of the last 10 s", {"waiting_percent": share}
    if share < SHORT:
        return Finding("memory.pressure", "pressure", value, data=data)
    cost = "programs wait for memory: a model that is loaded now makes it worse"
    return Finding("memory.pressure", "pressure", value, "warn", cost, CLOSE, data)


def _table(system: System) -> dict[str, int]:
    """/proc/meminfo in bytes, HugePages_* in pages; what psutil knows where there is none."""
    table = {
        name: int(number) * (1024 if unit else 1)
        for name, number, unit in re.findall(r"^(\w+):\s+(\d+)( kB)?", system.text("proc/meminfo"), re.MULTILINE)
    }
    if "MemTotal" not in table or "MemAvailable" not in table:
        import psutil

        memory, space = psutil.virtual_memory(), psutil.swap_memory()
        table |= {"MemTotal": memory.total, "MemAvailable": memory.available}
        table |= {"SwapTotal": space.total, "SwapFree": space.free}
    return table
