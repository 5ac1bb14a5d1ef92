"""The doctor measures lanes with the threads that a server would use: else no server could use its figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ftengine.config import EngineConfig
from ftengine.kernels import native
from ftengine.memory import plan
from ftengine.memory.plan import lane_threads
from ftlaunch.machine import gpu_link, lanes, memory_read, predict
from ftlaunch.machine.probe import Asked


@pytest.fixture(params=[2, 8, 16])
def cpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(plan, "usable_cpus", lambda: request.param)
    monkeypatch.setattr(plan, "cgroup_cpus", lambda: None)
    monkeypatch.setattr(native, "granted_threads", lambda: request.param)
    return int(request.param)


class Probe:
    """Of lanes that take 100 us for any number of experts, alone and together."""

    most = 8

    def __init__(self, banks: list[object], threads: int, *others: object) -> None:
        self.threads = threads

    def link(self, experts: int) -> float:
        return 100.0

    cpu = link

    def both(self, link: int, cpu: int) -> SimpleNamespace:
        return SimpleNamespace(link=100.0, cpu=100.0)

    def handshake(self) -> float:
        return 6.0

    def close(self) -> None:
        pass


@contextmanager
def nothing_refused(bank: object, device: str) -> Iterator[str]:
    yield ""


def test_what_the_doctor_measured_is_what_a_server_is_predicted_by(cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this system")
    pytest.importorskip("ftengine._native")
    from ftengine.bench import lanes as bench
    from ftengine.experts import probe

    made: list[Probe] = []

    def kept(*arguments: Any) -> Probe:
        made.append(Probe(*arguments))
        return made[0]

    monkeypatch.setattr(probe, "LaneProbe", kept)
    monkeypatch.setattr(bench, "pinned_bank", nothing_refused)
    known = {finding.id: finding.data for finding in gpu_link.lanes()}
    served = lane_threads(EngineConfig("x")).value
    assert [probe.threads for probe in made] == [known["gpu.lanes"]["threads"]] == [served]
    assert lanes.measured(known, 1_500_000, served) is not None
    assert lanes.measured(known, 1_500_000, served + 1) is None


def test_memory_is_read_once_unless_fewer_threads_were_asked_for(cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int | None] = []

    def short(threads: int | None = None) -> float:
        read.append(threads)
        return 7e9

    monkeypatch.setattr(memory_read, "short", short)
    asked = Asked(known={"memory.read": {"bytes_per_second": 40e9}})
    usual = lane_threads(EngineConfig("x")).value
    assert predict.machine_of(asked, threads=usual).lane == 40e9
    assert not read
    if usual > 1:
        assert predict.machine_of(asked, threads=usual - 1).lane == 7e9
        assert read == [usual - 1]
