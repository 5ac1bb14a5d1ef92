"""The CPU's lane, asked through a mailbox in plain memory: against the same kernels called directly, bit for bit."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ftengine.experts import mailbox as mailboxes
from ftengine.experts.pool import ExpertBank
from ftengine.formats.format import padded
from ftengine.kernels import native
from ftengine.kernels.triton.buffers import LINE, Mailbox
from tests.experts.banks import EXPERTS, bank
from tests.support.timing import quickest

_native = pytest.importorskip("ftengine._native")
from ftengine.experts.lane import Lane, off_cores, spare_cpus  # noqa: E402 - it imports the native library

TOP_K, TOKENS = 3, 4
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 20.0  # seconds that a reply may take


def directly(bank: ExpertBank, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    layout, out = bank.layout, torch.zeros(len(rows), bank.layout.hidden)
    filled = torch.zeros(len(rows), padded(layout.hidden), dtype=rows.dtype)
    filled[:, : layout.hidden] = rows
    _native.experts_packed(
        filled, ids, weights, bank.blocks, layout.hidden, layout.intermediate, layout.gate_up.number,
        layout.down.number, layout.bias, False, 0.0, 0.0, out,
    )  # fmt: skip
    return out


def asked(tokens: int, dtype: torch.dtype, hidden: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(-1, EXPERTS, (tokens, TOP_K), dtype=torch.int32)
    return torch.randn(tokens, hidden).to(dtype), ids, torch.rand(tokens, TOP_K)


def mail(dtype: torch.dtype = torch.float32, hidden: int = 64) -> Mailbox:
    return mailboxes.allocate(TOKENS, TOP_K, hidden, dtype, "cpu")


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 40])
def test_replies_equal_a_direct_call_bit_for_bit(hidden: int, dtype: torch.dtype, threads: int) -> None:
    banks = [bank("nvfp4", hidden), bank("bf16", hidden, 50, seed=1)]
    with Lane(banks, mail(dtype, hidden), threads) as lane:
        for turn in range(40):
            layer, (rows, ids, weights) = turn % 2, asked(1 + turn % TOKENS, dtype, hidden)
            found, seconds = lane.request(layer, rows, ids, weights, LIMIT)
            assert torch.equal(found, directly(banks[layer], rows, ids, weights))
            assert seconds > 0
        until(lambda: lane.counts().requests == 40)  # they are counted behind the reply
        assert lane.error() is None


def test_a_lane_says_that_its_process_runs_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftengine.experts.lane.PULSE", 0.001)
    box, seen = mail(), []
    with Lane([bank("bf16")], box, 1) as lane:
        until = time.monotonic() + LIMIT
        while len(set(seen)) < 5 and time.monotonic() < until:
            seen.append(int(box.error[1]))
            time.sleep(0.001)
        assert lane.error() is None  # which is another number
    assert lane.error() == "the CPU's part of the experts has ended"
    last = int(box.error[1])
    time.sleep(0.02)
    assert int(box.error[1]) == last >= len(set(seen)) - 1 >= 4


STOPPED = """
import os, signal, time
import torch
from ftengine.experts.lane import Lane
from tests.experts.banks import bank
from tests.experts.test_lane import asked, mail
with Lane([bank("bf16")], mail(), 2) as lane:
    lane.wake()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.0)  # the lane looks at the clock, and for a request, and finds none
    rows, ids, weights = asked(1, torch.float32)
    lane.request(0, rows, ids, weights, 20.0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes are not stopped here")
def test_a_request_is_heard_that_was_under_way_while_the_process_was_stopped() -> None:
    """For longer than a lane stays half awake; nobody wakes it again."""
    child = subprocess.Popen([sys.executable, "-c", STOPPED], cwd=ROOT)
    try:
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        time.sleep(62)
        child.send_signal(signal.SIGCONT)
        assert child.wait(60) == 0
    finally:
        child.kill()


def test_counts_are_those_of_the_requests() -> None:
    ids = torch.tensor([[0, 2, -1], [2, 2, 5]], dtype=torch.int32)
    with Lane([bank("bf16")], mail(), 2) as lane:
        for _ in range(3):
            lane.request(0, torch.randn(2, 64), ids, torch.rand(2, 3), LIMIT)
    counts = lane.counts()  # closed, it has counted the last one, too
    assert (counts.requests, counts.routes, counts.experts) == (3, 15, 9)
    assert 0 < counts.seconds < 3 * LIMIT


def test_seconds_are_those_of_the_layers_that_were_asked_for() -> None:
    """The log has each request's time, in order."""
    order, banks = [2, 0, 2, 2, 0], [bank("bf16", seed=layer) for layer in range(3)]
    with Lane(banks, mail(), 2) as lane:
        for layer in order:
            lane.request(layer, *asked(2, torch.float32), LIMIT)
    counts, times = lane.counts(), lane.log()[:, 3]
    expected = [sum(times[turn] for turn in range(len(order)) if order[turn] == layer) * 1e-9 for layer in range(3)]
    assert counts.layer_seconds == pytest.approx(expected, rel=1e-9)
    assert counts.layer_seconds[1] == 0.0
    assert sum(counts.layer_seconds) == pytest.approx(counts.seconds, rel=1e-9)


def test_a_refused_requests_time_is_no_layers() -> None:
    with Lane([bank("bf16"), bank("bf16")], mail(), 2) as lane:
        rows, ids, weights = asked(1, torch.float32)
        lane.request(1, rows, ids, weights, LIMIT)
        lane.request(1, rows, torch.full_like(ids, EXPERTS), weights, LIMIT)
        lane.request(2, rows, ids, weights, LIMIT)
    counts, times = lane.counts(), lane.log()[:, 3]
    assert counts.layer_seconds == pytest.approx([0.0, times[0] * 1e-9], rel=1e-9)
    assert counts.seconds == pytest.approx(times.sum() * 1e-9, rel=1e-9)


def test_rows_beyond_the_request_keep_what_they_hold() -> None:
    box = mail()
    box.out.fill_(7.0)
    with Lane([bank("bf16")], box, 2) as lane:
        rows, ids, weights = asked(2, torch.float32)
        lane.request(0, rows, ids, weights, LIMIT)
    assert torch.equal(box.out[2:], torch.full((TOKENS - 2, 64), 7.0))


@pytest.mark.parametrize(
    ("layer", "ids", "error"),
    [(1, [0, 1, 2], 2), (-1, [0, 1, 2], 2), (0, [0, EXPERTS, 1], 4), (0, [0, 2**31 - 1, 1], 4)],
)
def test_a_request_that_makes_no_sense_gets_zeros_and_a_reason(layer: int, ids: list[int], error: int) -> None:
    box = mail()
    box.out.fill_(7.0)
    with Lane([bank("bf16")], box, 2) as lane:
        given = torch.tensor([ids], dtype=torch.int32)
        found, _ = lane.request(layer, torch.randn(1, 64), given, torch.rand(1, 3), LIMIT)
        assert torch.equal(found, torch.zeros(1, 64))
        assert int(box.error[0]) == error
        assert lane.error() == mailboxes.ERRORS[error]
        rows, good, weights = asked(1, torch.float32)  # the lane lives, and the first error stays
        found, _ = lane.request(0, rows, good, weights, LIMIT)
        assert torch.equal(found, directly(bank("bf16"), rows, good, weights))
        assert int(box.error[0]) == error


@pytest.mark.parametrize(("tokens", "top_k"), [(TOKENS + 1, TOP_K), (-1, TOP_K), (2**31 - 1, TOP_K), (1, TOP_K + 1)])
def test_more_than_the_mailbox_holds_is_refused(tokens: int, top_k: int) -> None:
    """Rings by hand: Lane.request could not ask for it."""
    box = mail()
    guard = box.error[1:].clone()
    with Lane([bank("bf16")], box, 2):
        box.bell[1:4] = torch.tensor([0, tokens, top_k], dtype=torch.int32)
        box.bell[0] = 1
        until(lambda: int(box.reply[0]) == 1)
    assert int(box.error[0]) == 3
    assert torch.equal(box.error[1:], guard)


def until(condition, seconds: float = LIMIT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)


def test_sleeps_after_its_patience_and_serves_when_woken_and_when_not() -> None:
    with Lane([bank("bf16")], mail(), 2, patience=0.002) as lane:
        assert lane.counts().awakenings == 0
        lane.wake()
        until(lambda: lane.counts().awakenings == 1)
        until(lambda: not lane.awake)
        for wakes in (True, False):
            if wakes:
                lane.wake()
            rows, ids, weights = asked(1, torch.float32)
            found, _ = lane.request(0, rows, ids, weights, LIMIT)
            assert torch.equal(found, directly(bank("bf16"), rows, ids, weights))
            until(lambda: not lane.awake)


def test_a_sleeping_lane_uses_no_processor_time() -> None:
    with Lane([bank("bf16")], mail(), 2, patience=0.001) as lane:
        lane.wake()
        until(lambda: lane.counts().awakenings == 1 and not lane.awake)
        time.sleep(0.2)  # it looks at the bell less and less often

        def used() -> float:
            """Of the whole process, whose other threads may end something."""
            before = time.process_time()
            time.sleep(0.3)
            return time.process_time() - before

        assert quickest(used, 0.1) < 0.1


@pytest.mark.parametrize("state", ["asleep", "awake", "never used"])
def test_close_returns_at_once(state: str) -> None:
    lane = Lane([bank("bf16")], mail(), 2, patience=10.0 if state == "awake" else 0.001)
    if state != "never used":
        rows, ids, weights = asked(1, torch.float32)
        lane.request(0, rows, ids, weights, LIMIT)
    if state == "asleep":
        until(lambda: not lane.awake)
    start = time.perf_counter()
    lane.close()
    assert time.perf_counter() - start < 5  # milliseconds, and what a busy test machine adds
    lane.close()
    lane.wake()
    with pytest.raises(ValueError, match="the lane is closed"):
        lane.request(0, torch.randn(1, 64), torch.zeros(1, 3, dtype=torch.int32), torch.rand(1, 3))


def test_other_callers_of_the_pool_get_it_while_the_lane_is_awake() -> None:
    """They and the lane take turns: neither waits for the other's end, and each gets its own results."""
    one, errors = bank("nvfp4"), []
    data, x = torch.ones(4096 * 64).view(torch.uint8), torch.ones(4, 64)
    done = threading.Event()

    def others() -> None:
        try:
            for _ in range(100):
                out = torch.zeros(4, 4096)
                _native.linear_packed(x, data, 4096, 64, 0, out, threads=2)
                assert torch.equal(out, torch.full_like(out, 64.0))
        except BaseException as error:
            errors.append(error)
        done.set()

    with Lane([one], mail(), 2, patience=10.0) as lane:  # would hold the threads for ever
        lane.wake()
        caller = threading.Thread(target=others)
        caller.start()
        while not done.is_set():
            rows, ids, weights = asked(2, torch.float32)
            found, _ = lane.request(0, rows, ids, weights, LIMIT)
            assert torch.equal(found, directly(one, rows, ids, weights))
        caller.join()
    assert errors == []


def test_a_lane_that_nobody_holds_ends() -> None:
    """A thread that was joined may be listed for a moment, those of other tests' lanes, too."""
    before = threads_of_this_process()
    lane = Lane([bank("bf16")], mail(), 1)
    own = threads_of_this_process() - before
    assert len(own) == 2  # one serves, one says that the process runs
    del lane
    gc.collect()
    until(lambda: not own & threads_of_this_process())


def threads_of_this_process() -> set[str]:
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("this system does not list a process's threads")
    return set(os.listdir("/proc/self/task"))


PROGRAM = """
import os, sys, torch
from tests.experts.test_lane import *
lane = Lane([bank("bf16")], mail(), 2, patience=5.0)
rows, ids, weights = asked(1, torch.float32)
lane.request(0, rows, ids, weights, LIMIT)
"""


def python(code: str) -> str:
    command = [sys.executable, "-c", PROGRAM + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_process_ends_while_a_lane_spins() -> None:
    assert python("print('end')") == "end"


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_a_forked_child_leaves_its_parents_lane_alone() -> None:
    code = """
import gc
child = os.fork()
if child == 0:
    lane.wake()
    lane.close()
    with Lane([bank("bf16")], mail(), 2) as own:
        own.request(0, rows, ids, weights, LIMIT)
    os._exit(7)
status = os.waitpid(child, 0)[1]
lane.request(0, rows, ids, weights, LIMIT)
print(os.waitstatus_to_exitcode(status))
"""
    assert python(code) == "7"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks on this system")
def test_the_caller_keeps_off_the_lanes_cores_and_no_further() -> None:
    mask, cores = os.sched_getaffinity(0), _native.physical_cores()
    given = len(cores) > 1 and native.granted_threads() >= len(cores)
    for threads in range(1, len(mask) + 2):
        spare = spare_cpus(threads)
        assert spare == (mask - set(cores[:threads]) if given else set())
        with off_cores(threads):
            assert os.sched_getaffinity(0) == (spare or mask)
        assert os.sched_getaffinity(0) == mask


def test_a_mailbox_lies_on_lines_of_its_own_and_is_zero() -> None:
    box = mail(torch.bfloat16)
    parts = (box.bell, box.ids, box.weights, box.rows, box.reply, box.out, box.error)
    assert all(part.data_ptr() % (2 * LINE) == 0 and not part.any() for part in parts)
    assert box.rows.dtype == torch.bfloat16


def test_bad_arguments_are_refused() -> None:
    good = bank("bf16")
    with pytest.raises(ValueError, match="rows of 32"):
        Lane([good], mail(hidden=32), 2)
    with pytest.raises(ValueError, match="bank 1 must be"):
        Lane([good, ExpertBank(good.layout, good.blocks[:, :4096].contiguous())], mail(), 2)
    with pytest.raises(ValueError, match="threads"):
        Lane([good], mail(), 0)
    with pytest.raises(ValueError, match="patience"):
        Lane([good], mail(), 2, patience=-1.0)
    with pytest.raises(ValueError, match="version"):
        Lane([good], mail(), 2, isa="mmx")
    with pytest.raises(TypeError, match="rows must be"):
        Lane([good], mail(torch.float16), 2)


@pytest.mark.parametrize("isa", native.instruction_sets())
def test_every_version_of_the_kernels(isa: str) -> None:
    one = bank("nvfp4")
    with Lane([one], mail(torch.bfloat16), 2, isa=isa) as lane:
        rows, ids, weights = asked(TOKENS, torch.bfloat16)
        found, _ = lane.request(0, rows, ids, weights, LIMIT)
        assert (found - directly(one, rows, ids, weights)).abs().max() <= 1e-2 * found.abs().max().clamp_min(1)
