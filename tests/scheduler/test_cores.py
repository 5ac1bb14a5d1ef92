"""Which CPUs the engine's threads may use beside a lane. Needs two CPUs and Linux's affinity."""

from __future__ import annotations

import os
import threading

import pytest

from ftengine.scheduler import cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="there is one CPU, or no affinity"
)


def test_threads_leave_the_lanes_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    kept = {max(before)}
    monkeypatch.setattr(cores, "LEAST", 1)  # of two CPUs
    monkeypatch.setattr(cores, "spare_cpus", lambda threads: kept if threads == 3 else set())
    go, masks = threading.Event(), {}

    def work(name: str, *, starts: bool) -> None:
        go.wait(10)
        masks[name] = os.sched_getaffinity(0)
        if starts:
            child = threading.Thread(target=work, args=("started later",), kwargs={"starts": False})
            child.start()
            child.join(10)

    there = threading.Thread(target=work, args=("there",), kwargs={"starts": True})
    there.start()
    try:
        assert cores.keep_off_cores(2) == set()
        assert os.sched_getaffinity(0) == os.sched_getaffinity(there.native_id) == before, "no choice, no change"
        assert cores.keep_off_cores(3) == kept
        go.set()
        there.join(10)
        assert masks == {"there": kept, "started later": kept}
        assert os.sched_getaffinity(0) == kept, "the thread that calls too"
    finally:
        go.set()
        for thread in threading.enumerate():
            if thread.native_id is not None:
                os.sched_setaffinity(thread.native_id, before)


def test_a_single_cpu_is_left_to_the_thread_that_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(cores, "spare_cpus", lambda threads: {max(before)})
    assert cores.keep_off_cores(3) == set()
    assert os.sched_getaffinity(0) == before
