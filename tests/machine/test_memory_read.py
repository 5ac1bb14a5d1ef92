"""Read bandwidth: against a program of its own in C, and where there is too little room to measure."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ftengine.kernels import native
from ftlaunch.machine import memory_read
from ftlaunch.machine.computing import Computing, Watch
from ftlaunch.machine.modules import UDEV
from tests.machine.boards import DUAL, udev

SOURCE = Path(__file__).with_name("stream_read.c")
pytestmark = pytest.mark.skipif(not native.AVAILABLE, reason="the native library is not built")


@pytest.mark.slow
def test_against_stream(tmp_path: Path) -> None:
    """Within 10 %, the best of some runs of both, turn by turn: this wants a quiet machine."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    program, size, threads = tmp_path / "stream_read", 1 << 30, native.granted_threads()
    subprocess.run([compiler, "-O3", "-march=native", "-pthread", "-o", program, SOURCE], check=True)
    buffer, ours, theirs = memory_read.filled(size, size), 0.0, 0.0
    for _ in range(3):
        ours = max(ours, memory_read.bandwidth(buffer, threads))
        told = subprocess.run([program, str(size), str(threads)], capture_output=True, text=True, check=True)
        theirs = max(theirs, float(told.stdout))
    assert ours == pytest.approx(theirs, rel=0.1)


def test_measured(tree) -> None:
    """Little, to be quick: the numbers are those of the machine all the same."""
    found = memory_read.read(tree({}), 256 << 20, "of a test")
    assert found.data["bytes"] <= 64 << 20
    assert 1e9 < found.data["bytes_per_second"] < 2e12
    assert found.data["threads"] == native.granted_threads()


@pytest.mark.parametrize(("measured", "verdict"), [(60e9, "ok"), (30e9, "note")])
def test_against_what_the_modules_can_do(tree, monkeypatch: pytest.MonkeyPatch, measured: float, verdict: str) -> None:
    monkeypatch.setattr(memory_read, "bandwidth", lambda buffer, threads: measured)
    found = memory_read.read(tree({UDEV: udev(DUAL)}), 256 << 20, "of a test")
    assert found.verdict == verdict
    assert f"{measured / 89.6e9:.0%} of what the modules can do" in found.value


def test_memory_that_is_slow_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was asked for, as much as there is time for, and at least what makes sense."""
    monkeypatch.setattr(memory_read, "FILL_SECONDS", -1)
    buffer = memory_read.filled(64 << 20, 8 << 20)
    assert len(buffer) == 8 << 20
    assert set(buffer[:: 1 << 20]) == {1}


class Seen(Watch):
    """As if so much had been computed meanwhile."""

    def __init__(self, **computed) -> None:
        self.computed = Computing(**computed)

    def seen(self, least: float = 0.0) -> Computing:
        return self.computed


def test_others_compute_meanwhile(tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_read, "bandwidth", lambda buffer, threads: 30e9)
    assert memory_read.read(tree({}), 256 << 20, "of a test", watch=Seen()).verdict == "ok"
    found = memory_read.read(
        tree({}), 256 << 20, "of a test", watch=Seen(others=1.5, cpus=2, programs={"cc1plus": 1.5})
    )
    assert found.verdict == "note"
    assert found.cost == "computed meanwhile: other programs with 1.5 of 2 CPUs (cc1plus); it may be more"
    found = memory_read.read(tree({}), 256 << 20, "of a test", watch=Seen(servers={"demo": 1.5}, cpus=2))
    assert found.cost == "computed meanwhile: ft's server of demo with 1.5; it may be more"
    assert found.mend == "wait until it has answered, and run it again"


def test_too_little_room(tree) -> None:
    cache = {"sys/devices/system/cpu/cpu0/cache/index3/size": "32768K\n"}
    found = memory_read.read(tree(cache), 256 << 20, "memory limit of the cgroup")
    assert found.verdict == "note"
    assert found.value == "not measured: 256 MiB are free (memory limit of the cgroup)"
    assert found.data["bytes_per_second"] is None
