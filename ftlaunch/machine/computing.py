"""Who computes now: CPU time that programs take while something is looked at or measured.

A load average tells of the minute before, and of ft's own work as of others'. Here ft's own processes are left out, and
what its servers take is counted apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

    from ftlaunch.servers import ServerRecord

BUSY = 0.25  # of the CPUs
SHOWN, LEAST = 3, 0.05  # programs that are named; CPUs that they take at the least
WORKING = ("user", "nice", "system", "irq", "softirq")  # of the whole machine's times; others rest or were not given
ATTEMPTS = 5


@dataclass(frozen=True)
class Computing:
    """CPUs' worth of time, by whom. others: all but ft's own processes and its servers; programs: of those the most
    busy, by name; servers: by what they serve. own: of the process that asks, and all that it started.
    """

    others: float = 0.0
    own: float = 0.0
    servers: dict[str, float] = field(default_factory=dict)
    programs: dict[str, float] = field(default_factory=dict)
    cpus: int = 1
    seconds: float = 0.0

    @property
    def others_busy(self) -> bool:
        return self.others >= BUSY * self.cpus

    @property
    def busy_servers(self) -> list[str]:
        return [name for name, cpus in self.servers.items() if cpus >= BUSY * self.cpus]

    def who(self) -> str:
        """Those that take so much that they disturb; empty where nobody does."""
        found = []
        if self.others_busy:
            names = f" ({', '.join(self.programs)})" if self.programs else ""
            found.append(f"other programs with {self.others:.1f} of {self.cpus} CPUs{names}")
        found += [f"ft's server of {name} with {self.servers[name]:.1f}" for name in self.busy_servers]
        return " and ".join(found)

    def as_json(self) -> dict[str, Any]:
        return {name: _rounded(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Computing:
        """What `as_json` gave, among others or not; else that nobody computes."""
        return Computing(**{each.name: data[each.name] for each in fields(Computing) if each.name in data})


class Watch:
    """From when it is made until `seen`. root: the process that asks. servers: ft's."""

    def __init__(self, root: int, servers: Iterable[ServerRecord] = ()) -> None:
        self._root, self._servers = root, {record.pid: record.served_name for record in servers}
        self._before = self._read()

    def seen(self, least: float = 0.0) -> Computing:
        """After so many seconds at the least."""
        time.sleep(max(0.0, self._before.at + least - time.monotonic()))
        before, after = self._before, self._read()
        seconds = max(1e-3, after.at - before.at)
        own = after.family(self._root) - before.family(self._root)
        servers: dict[str, float] = {}
        for pid, name in self._servers.items():  # of which several may have one name
            taken = max(0.0, after.family(pid) - before.family(pid)) / seconds
            servers[name] = servers.get(name, 0.0) + taken
        others = (after.machine - before.machine - own) / seconds - sum(servers.values())
        ours = after.ours | before.ours
        programs: dict[str, float] = {}
        for pid, (name, spent) in after.processes.items():
            taken = (spent - before.processes.get(pid, (name, 0.0))[1]) / seconds
            if pid not in ours and taken > 0:
                programs[name] = programs.get(name, 0.0) + taken
        most = sorted((item for item in programs.items() if item[1] >= LEAST), key=lambda item: -item[1])[:SHOWN]
        return Computing(max(0.0, others), max(0.0, own) / seconds, servers, dict(most), os.cpu_count() or 1, seconds)

    def _read(self) -> _Times:
        families = {pid: _family(pid) for pid in (self._root, *self._servers)}
        return _Times(families)


class _Times:
    """CPU seconds until now: of the machine, of families by the process that began them, of each process."""

    def __init__(self, families: dict[int, tuple[float, set[int]]]) -> None:
        import psutil

        self.at = time.monotonic()
        self.machine = machine_seconds()
        self._families = families
        self.ours = {pid for _, members in families.values() for pid in members}
        self.processes: dict[int, tuple[str, float]] = {}
        for process in psutil.process_iter(["name", "cpu_times"]):
            times = process.info["cpu_times"]
            if times is not None:
                self.processes[process.pid] = (process.info["name"] or "?", times.user + times.system)

    def family(self, pid: int) -> float:
        return self._families[pid][0]


def machine_seconds() -> float:
    """CPU time that all processes of this machine, and its kernel, have taken until now."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in WORKING))


def _family(pid: int) -> tuple[float, set[int]]:
    """CPU time of a process and of all that it started, those that have ended too; and who is there."""
    import psutil

    try:
        root = psutil.Process(pid)
        for _ in range(ATTEMPTS):  # a child that ends meanwhile would count twice, or not at all
            before = root.cpu_times()
            children = root.children(recursive=True)
            spent = sum(_spent(child) for child in children)
            after = root.cpu_times()
            if _of_ended(before) == _of_ended(after):
                break
        return spent + after.user + after.system + _of_ended(after), {pid, *(child.pid for child in children)}
    except psutil.Error:
        return 0.0, {pid}


def _spent(process: psutil.Process) -> float:
    import psutil

    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + _of_ended(times))


def _of_ended(times: Any) -> float:
    """Of children that were waited for, and of theirs."""
    return float(times.children_user + times.children_system)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: round(each, 2) for name, each in value.items()}
    return round(value, 2)
