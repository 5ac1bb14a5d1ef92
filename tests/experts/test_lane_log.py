"""What the CPU's lane says of its last requests, against what was asked and how long that took from outside."""

from __future__ import annotations

import threading
import time

import numpy
import pytest
import torch

_native = pytest.importorskip("ftengine._native")
from ftengine.experts import mailbox as mailboxes  # noqa: E402 - they import the native library
from ftengine.experts.lane import LOGGED, Lane  # noqa: E402
from tests.experts.banks import bank  # noqa: E402

IDS = ([[0, 2, -1], [2, 2, 5]], [[1, -1, -1]], [[-1, -1, -1]])
EXPERTS, ROUTES = (3, 1, 0), (5, 1, 0)  # distinct ones, and pairs of a row and an expert


def made(threads: int = 2) -> Lane:
    return Lane([bank("bf16")], mailboxes.allocate(2, 3, 64, torch.float32, "cpu"), threads)


def ask(lane: Lane, number: int) -> float:
    ids = torch.tensor(IDS[number % 3], dtype=torch.int32)
    return lane.request(0, torch.zeros(len(ids), 64), ids, torch.rand(ids.shape))[1]


def test_each_request_is_logged() -> None:
    with made() as lane:
        assert lane.log().shape == (0, 5)
        begin = time.perf_counter_ns()
        seconds = [ask(lane, number) for number in range(7)]
        spent = time.perf_counter_ns() - begin
        time.sleep(0.02)
        ask(lane, 7)
        found = lane.log()
    assert found[:, 0].tolist() == list(range(1, 9))
    assert found[:, 1].tolist() == [EXPERTS[number % 3] for number in range(8)]
    assert found[:, 2].tolist() == [ROUTES[number % 3] for number in range(8)]
    assert bool((found[:7, 3] <= 1e9 * torch.tensor(seconds).double().numpy() + 1).all())
    assert bool((found[:, 3] > 0).all())
    assert found[1:7, 3:].sum() <= spent
    assert found[7, 4] >= 20e6


def test_the_newest_are_kept_and_whole_while_they_are_read() -> None:
    """More requests than the log holds, from another thread: whatever is read is one row of requests after the other,
    each with its own counts."""
    with made(1) as lane:
        done = threading.Event()

        def work() -> None:
            for number in range(LOGGED + 500):
                ask(lane, number)
            done.set()

        worker = threading.Thread(target=work)
        worker.start()
        looks = 0
        while not done.is_set():
            check(lane.log())
            looks += 1
        worker.join()
        assert looks > 3
        found = lane.log()
    assert len(found) == LOGGED
    assert found[-1, 0] == LOGGED + 500
    check(found)


def check(found: numpy.ndarray) -> None:
    numbers = found[:, 0]
    assert bool((numpy.diff(numbers) == 1).all())
    assert bool((found[:, 1] == numpy.array(EXPERTS)[(numbers - 1) % 3]).all())
    assert bool((found[:, 2] == numpy.array(ROUTES)[(numbers - 1) % 3]).all())


def test_only_a_table_of_five_columns_is_filled() -> None:
    with made() as lane:
        ask(lane, 0)
        for wrong in (numpy.empty((4, 4), numpy.int64), numpy.empty((4, 5), numpy.int32), numpy.empty(5, numpy.int64)):
            with pytest.raises(TypeError):
                lane._native.copy_log(wrong)
        assert lane._native.copy_log(numpy.empty((0, 5), numpy.int64)) == 0
