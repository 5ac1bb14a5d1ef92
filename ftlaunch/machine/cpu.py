"""The processor: what it is, how much of it the process has, and what holds its clock down."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace

from ftengine.memory.machine import cgroup_cpus, cpu_name
from ftlaunch.machine.computing import Computing, Watch
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.system import System
from ftlaunch.machine.verdict import Finding, plural

FOLDER = "sys/devices/system/cpu"
# Scaling drivers whose "powersave" leaves the clock to the processor; of others it is the lowest clock for good.
# Documentation/admin-guide/pm/intel_pstate.rst and amd-pstate.rst of the kernel.
BY_ITSELF = ("intel_pstate", "amd-pstate-epp")
LOOK_SECONDS, QUICK_SECONDS = 0.5, 0.25  # at who computes, at the least


def probe(asked: Asked) -> Iterator[Finding]:
    from ftlaunch.servers import running

    system, watch = System(), Watch(os.getppid(), running())  # who asked, and all of its probes
    yield processor(system)
    yield cpus(system)
    yield instructions()
    yield clock(system)
    yield load(system, watch.seen(QUICK_SECONDS if asked.quick else LOOK_SECONDS))


def processor(system: System) -> Finding:
    name, cores, sockets = _counted(system)
    nodes = len(system.names("sys/devices/system/node", "node[0-9]*"))
    more = f", {plural(sockets, 'socket')}" if sockets > 1 else ""
    more += f", {plural(nodes, 'NUMA node')}" if nodes > 1 else ""
    more += ", virtual" if system.virtual else ""
    data = {"name": name, "cores": cores, "cpus": os.cpu_count(), "sockets": sockets, "numa_nodes": nodes or None}
    return Finding("cpu.processor", "processor", f"{name}, {plural(cores, 'core')}{more}", data=data)


def cpus(system: System) -> Finding:
    """That this process may use: by affinity, and by the time that its cgroups allow."""
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quota = cgroup_cpus(system.path("sys/fs/cgroup"), system.text("proc/self/cgroup"))
    usable = min(allowed, quota or allowed)
    data = {"usable": usable, "affinity": allowed, "cgroup": quota}
    value = f"{usable} of {total} can be used"
    finding = Finding("cpu.cpus", "CPUs", value, data=data)
    if usable == total:
        return finding
    cost = f"experts on the CPU and prompts have {usable / total:.0%} of its speed"
    if quota is not None and quota < allowed:
        mend = f"raise the cgroup's CPU limit: docker run --cpus {total}, systemd CPUQuota="
        return replace(finding, value=f"{value} (limit of the cgroup)").but("warn", cost, mend)
    mend = f"taskset -pc 0-{total - 1} $$, where nobody restricts it on purpose"
    return replace(finding, value=f"{value} (affinity)").but("warn", cost, mend)


def instructions() -> Finding:
    from ftengine.kernels import native

    if not native.AVAILABLE:
        return Finding(
            "cpu.kernels",
            "kernels",
            native.REASON,
            "bad",
            "everything on the CPU is many times slower",
            "pip install --force-reinstall ftlaunch",
            {"versions": [], "features": []},
        )
    versions, features = native.instruction_sets(), native.cpu_features()
    data = {"versions": versions, "features": features}
    chosen = os.environ.get("FT_ISA")
    if chosen:
        finding = Finding("cpu.kernels", "kernels", f"{chosen}, by FT_ISA; here run {', '.join(versions)}", data=data)
        if chosen in versions:
            return finding.but("note", "slower, where another is faster", "unset FT_ISA")
        return finding.but("bad", "ft serve refuses to start", "unset FT_ISA")
    if versions == ["portable"]:
        cost = "everything on the CPU is several times slower than with AVX2"
        mend = "none for this processor; in a virtual machine pass the host's CPU through (-cpu host)"
        return Finding("cpu.kernels", "kernels", "portable: no AVX2", "warn", cost, mend, data)
    return Finding("cpu.kernels", "kernels", ", ".join(versions), data=data)


def clock(system: System) -> Finding:
    """Governor, preference, turbo, platform profile: the first that holds the clock down."""
    governors = _distinct(system, "cpufreq/scaling_governor")
    driver = system.text(f"{FOLDER}/cpu0/cpufreq/scaling_driver")
    preferences = _distinct(system, "cpufreq/energy_performance_preference")
    lowest, highest = (system.number(f"{FOLDER}/cpu0/cpufreq/cpuinfo_{end}_freq") for end in ("min", "max"))
    limit = system.number(f"{FOLDER}/cpu0/cpufreq/scaling_max_freq")
    turbo = _turbo(system)
    profile = system.text("sys/firmware/acpi/platform_profile")
    data = {
        "driver": driver or None,
        "governors": governors,
        "preferences": preferences,
        "highest_khz": highest,
        "limit_khz": limit,
        "turbo": turbo,
        "profile": profile or None,
    }
    parts = [", ".join(governors), ", ".join(preferences), f"up to {_ghz(limit)}" if limit else ""]
    value = ", ".join(filter(None, parts)) or "not told by the system"
    cost = mend = ""
    if governors == ["powersave"] and driver not in BY_ITSELF:
        clocks = f", {_ghz(lowest)} of {_ghz(highest)}" if lowest and highest else ""
        cost = f"the CPU stays at its lowest clock{clocks}"
        mend = "sudo cpupower frequency-set -g schedutil"
    elif preferences == ["power"] or profile in ("low-power", "quiet"):
        value += "" if preferences == ["power"] else f", platform profile {profile}"
        cost = "the CPU clocks low also while it computes experts"
        mend = "powerprofilesctl set balanced (or performance)"
    elif limit and highest and limit < 0.9 * highest:
        cost = f"the clock is held at {limit / highest:.0%} of what the CPU can"
        mend = f"sudo cpupower frequency-set -u {highest}"
    elif turbo is False:
        value += ", turbo off"
        cost = "a third of the clock or so is unused where cooling allows it"
        mend = f"echo {'0' if 'pstate' in driver else '1'} | sudo tee /{_turbo_file(system)}"
    return Finding("cpu.clock", "clock", value, "warn" if cost else "ok", cost, mend, data)


def load(system: System, now: Computing) -> Finding:
    """Of this moment; the system's average, which tells of the last minute and of ft itself, is for programs."""
    data = {"average": _load(system), **now.as_json()}
    value = f"others take {now.others:.1f} of {now.cpus} CPUs now"
    if now.programs:
        value += f": {', '.join(f'{name} {cpus:.1f}' for name, cpus in now.programs.items())}"
    servers = [f"ft's server of {name} takes {now.servers[name]:.1f}" for name in now.busy_servers]
    finding = Finding("cpu.load", "load", "; ".join([value, *servers]), data=data)
    if now.others_busy:
        cost = "other programs compute: what is measured here, and what is served, is slower"
        return finding.but("note", cost, "end them; top shows more")
    if servers:
        return finding.but("note", "a server of ft computes: what is measured here is slower", "wait, or ft stop")
    return finding


def _counted(system: System) -> tuple[str, int, int]:
    """Name, cores, sockets."""
    text = system.text("proc/cpuinfo")
    ids = re.compile(r"^(physical id|core id)\s*:\s*(\d+)$", re.MULTILINE)
    blocks = [dict(ids.findall(block)) for block in text.split("\n\n")]
    cores = {(block.get("physical id"), block["core id"]) for block in blocks if "core id" in block}
    sockets = {block["physical id"] for block in blocks if "physical id" in block}
    if not cores:
        import psutil

        count = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        return cpu_name(text), count, 1
    return cpu_name(text), len(cores), max(1, len(sockets))


def _distinct(system: System, name: str) -> list[str]:
    found = {system.text(path) for path in system.names(FOLDER, f"cpu[0-9]*/{name}")}
    return sorted(filter(None, found))


def _turbo_file(system: System) -> str:
    pstate = f"{FOLDER}/intel_pstate/no_turbo"
    return pstate if system.text(pstate) else f"{FOLDER}/cpufreq/boost"


def _turbo(system: System) -> bool | None:
    path = _turbo_file(system)
    value = system.number(path)
    return None if value is None else (value == 0) == path.endswith("no_turbo")


def _ghz(kilohertz: int) -> str:
    return f"{kilohertz / 1e6:.1f} GHz"


def _load(system: System) -> float | None:
    first = system.text("proc/loadavg").partition(" ")[0]
    try:
        return float(first) if first else os.getloadavg()[0]
    except (ValueError, OSError):
        return None
