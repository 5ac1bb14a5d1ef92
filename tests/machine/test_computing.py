"""Who computes: real processes, whose CPU time the kernel counts, against who is said to have taken it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ftlaunch.machine import computing
from ftlaunch.machine.computing import Computing, Watch
from ftlaunch.servers import ServerRecord

BURN = "while True: pass"
# Burns as a child of a process that rests, and once more as a grandchild that has ended
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}], timeout=30)"
ENDED = (
    "import subprocess, sys, time; subprocess.run([sys.executable, '-c', 'sum(range(10**7))']); print(); time.sleep(60)"
)


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.communicate()


def burned(pid: int, seconds: float) -> None:
    """Waits until a process has taken so much CPU time more."""
    process = psutil.Process(pid)
    start = process.cpu_times().user
    while process.cpu_times().user < start + seconds:
        time.sleep(0.02)


def child_of(parent: subprocess.Popen[str]) -> int:
    while not (children := psutil.Process(parent.pid).children()):
        time.sleep(0.01)
    return children[0].pid


def server(pid: int) -> ServerRecord:
    return ServerRecord("id", pid, "127.0.0.1", 1919, "demo", "demo", None, 0.0, None, None)


def test_each_has_its_share() -> None:
    """Of three that compute, one is ours, one a server's engine, and one is somebody else's."""
    with running(PARENT) as ours, running(PARENT) as front, running(BURN) as other:
        pids = [child_of(ours), child_of(front), other.pid]
        for pid in pids:
            burned(pid, 0.05)
        before = {pid: psutil.Process(pid).cpu_times().user for pid in pids}
        watch = Watch(ours.pid, [server(front.pid)])
        for pid in pids:
            burned(pid, 0.15)
        found = watch.seen(least=0.3)
        taken = {pid: psutil.Process(pid).cpu_times().user - before[pid] for pid in pids}
    assert found.seconds >= 0.3
    assert found.cpus == os.cpu_count()
    assert 0.1 <= found.own * found.seconds <= taken[pids[0]] + 0.1
    assert 0.1 <= found.servers["demo"] * found.seconds <= taken[pids[1]] + 0.1
    assert found.others * found.seconds >= 0.1
    name = psutil.Process().name()
    assert name in found.programs or len(found.programs) == computing.SHOWN  # where others are busier still


def test_servers_of_one_name_are_added() -> None:
    with running(BURN) as one, running(BURN) as two:
        watch = Watch(os.getpid(), [server(one.pid), server(two.pid)])
        for pid in (one.pid, two.pid):
            burned(pid, 0.15)
        found = watch.seen()
    assert found.servers["demo"] * found.seconds >= 0.28  # two ticks less than both together took


def test_what_ft_did_itself_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where nothing but ft's own processes runs, also of those that have ended meanwhile."""
    with running(ENDED) as ours:
        spent = lambda: computing._family(ours.pid)[0]  # noqa: E731
        monkeypatch.setattr(computing, "machine_seconds", spent)
        watch = Watch(ours.pid)
        assert ours.stdout is not None
        ours.stdout.readline()
        found = watch.seen()
    assert found.own * found.seconds > 0.05
    assert found.others * found.seconds <= 0.02  # a tick or two between the readings
    assert not found.others_busy


def test_who_disturbs_is_named() -> None:
    rests = Computing(others=0.4, servers={"demo": 0.1}, programs={"python": 0.4}, cpus=2)
    assert rests.who() == ""
    busy = Computing(others=1.2, servers={"demo": 0.8, "idle": 0.0}, programs={"cc1plus": 0.9, "ld": 0.3}, cpus=2)
    assert busy.who() == "other programs with 1.2 of 2 CPUs (cc1plus, ld) and ft's server of demo with 0.8"
    assert Computing.from_json({"average": 1.0, **busy.as_json()}) == busy
    assert Computing.from_json({}) == Computing()


def test_the_doctor_counts_others_and_not_itself(ft_home: Path) -> None:
    """Its probes of the CPU and of what is installed, side by side, while somebody else computes."""
    code = (
        "import json; from ftlaunch.machine.probe import Asked; from ftlaunch.machine.run import examine; "
        "print(json.dumps([each.as_json() for each in examine(Asked(), only=('cpu', 'software'))]))"
    )
    with running(BURN) as other:
        burned(other.pid, 0.05)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    found = {each["id"]: each for each in json.loads(done.stdout)}["cpu.load"]
    assert found["data"]["others"] > 0.1
    assert found["data"]["own"] > 0
    take, of = found["value"].removeprefix("others take ").split(" CPUs now")[0].split(" of ")
    assert float(take) == pytest.approx(found["data"]["others"], abs=0.06), "both are rounded"
    assert int(of) == os.cpu_count()
