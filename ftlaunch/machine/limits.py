"""What the system lets a process take: locked memory, pinning, addresses, open files."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator

from ftlaunch.machine import pci
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.system import System
from ftlaunch.machine.verdict import Finding, gib

ADDRESSES = 1 << 30  # bytes that an engine maps beside weights and caches: its libraries, and stacks of threads
FILES = 1024  # a server with 512 clients and a model in 60 files
UNLIMITED = "ulimit -v unlimited -d unlimited"
PIN_SHARE = 2  # WSL 2: Windows pins half of the virtual machine's memory


def probe(asked: Asked) -> Iterator[Finding]:
    system = System()
    yield memlock(any(card.vendor == pci.NVIDIA for card in pci.cards(system)) or system.wsl)
    yield pinning(system)
    yield addresses(system)
    yield files()


def memlock(matters: bool) -> Finding:
    """Most NVIDIA drivers pin without regard to it; where one does not, the log of `ft serve` names this limit.

    matters: there is a GPU to pin for.
    """
    soft, hard = map(_bytes, resource.getrlimit(resource.RLIMIT_MEMLOCK))
    data = {"soft": soft, "hard": hard}
    if soft is None or not matters:
        return Finding("limits.memlock", "locked memory", "unlimited" if soft is None else gib(soft), data=data)
    cost = "where the driver obeys it, experts are not pinned and nothing crosses the link"
    mend = "ulimit -l unlimited" if hard is None else "add `* - memlock unlimited` to /etc/security/limits.conf"
    return Finding("limits.memlock", "locked memory", gib(soft), "note", cost, mend, data)


def pinning(system: System) -> Finding:
    """What a GPU can be given to read of host memory."""
    total = _memory(system)
    if not system.wsl:
        return Finding("limits.pin", "pinning", "no limit of its own", data={"bytes": None, "wsl": False})
    most = None if total is None else total // PIN_SHARE
    value = f"about {gib(most)}, half of what WSL 2 has" if most else "about half of what WSL 2 has"
    cost = "experts beyond that are not pinned: the CPU computes all that have no slot"
    mend = "memory= in %UserProfile%\\.wslconfig, then wsl --shutdown"
    return Finding("limits.pin", "pinning", value, "note", cost, mend, {"bytes": most, "wsl": True})


def addresses(system: System) -> Finding:
    """Limits of what may be asked for: ulimit -v and -d, and overcommit 2, which refuses what may never be used."""
    found = [_bytes(resource.getrlimit(kind)[0]) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    least = min((size for size in found if size is not None), default=None)
    strict = system.number("proc/sys/vm/overcommit_memory") == 2
    data = {"bytes": least, "overcommit": system.number("proc/sys/vm/overcommit_memory")}
    if least is not None:
        if least <= ADDRESSES:
            cost = "no model can be served"
            return Finding("limits.addresses", "addresses", gib(least), "bad", cost, UNLIMITED, data)
        cost = "a model of that size is refused, whatever is free"
        return Finding("limits.addresses", "addresses", gib(least), "warn", cost, UNLIMITED, data)
    if strict:
        cost = "memory is refused as soon as all that was promised would not fit"
        mend = "sudo sysctl vm.overcommit_memory=0"
        return Finding("limits.addresses", "addresses", "overcommit is off", "note", cost, mend, data)
    return Finding("limits.addresses", "addresses", "unlimited", data=data)


def files() -> Finding:
    soft = _bytes(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if soft is None or soft >= FILES:
        return Finding("limits.files", "open files", "unlimited" if soft is None else str(soft), data={"soft": soft})
    cost = "a server refuses clients beyond that"
    return Finding("limits.files", "open files", str(soft), "warn", cost, f"ulimit -n {FILES}", {"soft": soft})


def _bytes(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _memory(system: System) -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB", system.text("proc/meminfo"), re.MULTILINE)
    return int(found.group(1)) << 10 if found else None
