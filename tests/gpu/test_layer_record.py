"""What layers of decode steps record of themselves, and the splits that are tried: against the cache's own counters,
the CPU lane's log and the tables that the host sent."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("ftengine._native", reason="the CPU's lane is not built")

from ftengine.experts.layer_times import LayerRecord, LayerTimes, layer_times
from ftengine.experts.online import EVERY
from ftengine.experts.slots import SlotPool
from ftengine.kernels.triton import cache_state as at
from ftengine.kernels.triton.buffers import RouteBuffers
from ftengine.kernels.triton.fetch import fetch
from ftengine.kernels.triton.join import join
from ftengine.kernels.triton.route import route
from ftengine.kernels.triton.split import TRIALS, TRIED
from ftengine.kernels.triton.victims import end_step
from tests.gpu.cache_setup import HIDDEN, make_banks, make_mailbox
from tests.gpu.models import load_gpu, prompt_of, setup, start, write

LAYERS, EXPERTS, TOP_K = 2, 8, 2


@pytest.mark.parametrize("rows", [1, 3])
def test_trials_take_turns(rows: int, device: str) -> None:
    """Layer after layer of step after step; nothing stays in slots, so that every expert is missing."""
    banks = make_banks(LAYERS, EXPERTS, device)
    pool = SlotPool(banks, 0, EXPERTS, TOP_K, device)
    table = pool.tensors.split.cpu().numpy().copy()
    for number in range(len(table)):
        table[number] = numpy.minimum(numpy.arange(table.shape[2]), number % 3)
    pool.set_split(table)
    every = 5
    pool.set_trials(every)
    buffers, mailbox = RouteBuffers.allocate(rows, TOP_K, device), make_mailbox(rows, TOP_K, device)
    for step in range(every * TRIALS.value // LAYERS + 1):
        for layer in range(LAYERS):
            logits = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(step)).to(device)
            hidden = torch.zeros(rows, HIDDEN, device=device)
            route(pool.tensors, layer, logits, hidden, TOP_K, True, buffers, mailbox)
            fetch(pool.tensors, layer, banks[layer], buffers)
            turn = step * LAYERS + layer
            number = 1 + turn // every % TRIALS.value if turn % every < TRIED.value else 0
            assert int(buffers.fetch.count) == number % 3
        end_step(pool.tensors)


@pytest.mark.slow
def test_layers_of_a_model_are_recorded(tmp_path: Path, device: str) -> None:
    """Two steps of one sequence and one of two: rows, missing and fetched experts, and the CPU's requests. Then the
    split looks at them."""
    model = load_gpu(write("mixtral", tmp_path), device)
    model.prepare(setup("hybrid", slots=2, max_running=2))
    try:
        experts = model.experts
        assert experts.pool is not None
        assert experts.lane is not None
        assert experts.split is not None
        driver = start(model)
        first, second = (driver.add(prompt_of(6, seed)) for seed in (1, 2))
        before = experts.pool.stats().total
        for sequences in ([first], [first], [first, second]):
            driver.step([(sequence, 1) for sequence in sequences])
        after, layers = experts.pool.stats().total, experts.pool.layers
        record = LayerRecord(experts.pool.tensors)
        assert record.take(experts.lane.log()) is None
        record.queue()
        if device == "cuda":
            torch.cuda.synchronize()
        times = record.take(experts.lane.log())
        for _ in range(EVERY + 1):
            experts.wake()
        assert set(experts.split.learner.rows) == {1, 2}
    finally:
        model.close()
    assert times is not None
    assert len(times) == 3 * layers
    assert sorted(times.rows.tolist()) == [1] * 2 * layers + [2] * layers
    assert times.misses.sum() == after.misses - before.misses
    assert times.fetched.sum() == after.fetched - before.fetched
    assert times.on_cpu.sum() == after.cpu_experts - before.cpu_experts
    assert times.routes.sum() == after.cpu_routes - before.cpu_routes
    asked = times.on_cpu > 0
    assert bool(asked.any())
    assert not numpy.isnan(times.served[asked]).any()
    assert numpy.isnan(times.served[~asked]).all()
    assert bool((times.done >= times.gpu).all())
    if device == "cuda":  # the interpreter has no clock
        assert bool((times.done[asked] > times.served[asked]).all())
        assert bool((times.gpu >= times.copy * (times.fetched > 0)).all())


def test_only_new_layers_are_taken() -> None:
    """The ring goes round; what was seen before is left out, and what 255 stands for too."""
    record = numpy.zeros((at.RECORDED.value, 1, at.RECORD.value), numpy.int32)
    record[:, 0, at.AT_STEP.value] = numpy.roll(numpy.arange(10, 42), 7)
    record[:, 0, at.WHAT.value] = 1 | 3 << 8 | 1 << 16
    record[0, 0, at.WHAT.value] = -1
    record[:, 0, at.AT_TIME.value] = numpy.roll(numpy.arange(32, dtype=numpy.int64) * 10**9, 7).astype(numpy.int32)
    times = layer_times(record, numpy.zeros((0, 5), numpy.int64), 21)
    assert len(times) == 20 - (record[0, 0, at.AT_STEP.value] > 21)
    assert set(times.misses.tolist()) == {3}
    assert times.step_us == 1e6


@pytest.mark.parametrize("shift", [2**31 - 20, 2**32 - 20, 2**32 - 3])
def test_numbers_of_steps_and_requests_may_wrap_around(shift: int) -> None:
    """The same as numbers that do not: after days of decoding they are past the largest int32, and then past 0."""

    def times(first: int, after: int) -> LayerTimes:
        steps = numpy.roll(numpy.arange(first, first + at.RECORDED.value), 5)
        record = numpy.zeros((at.RECORDED.value, 1, at.RECORD.value), numpy.int32)
        record[:, 0, at.AT_STEP.value] = _int32(steps)
        record[:, 0, at.ASKED.value] = _int32(3 * steps)
        record[:, 0, at.WHAT.value] = 1 | 3 << 8 | 1 << 16
        record[:, 0, at.AT_TIME.value] = _int32((steps - first) * 10**6)
        log = numpy.zeros((200, 5), numpy.int64)
        log[:, 0] = _int32(3 * first - 50 + numpy.arange(200))
        log[:, 2], log[:, 3] = numpy.arange(200) % 7, 1000 + numpy.arange(200)
        return layer_times(record, log, int(_int32(numpy.array([after]))[0]))

    usual, found = times(100, 111), times(100 + shift, 111 + shift)
    some = usual.served > 0
    assert bool(some.all())
    assert len(found) == len(usual) == 20
    number_zero = 1 if any((3 * (100 + shift + step)) % 2**32 == 0 for step in range(12, 32)) else 0
    assert numpy.isnan(found.served).sum() == number_zero
    known = ~numpy.isnan(found.served)
    assert found.served[known].tolist() == usual.served[known].tolist()
    assert found.routes[known].tolist() == usual.routes[known].tolist()
    assert found.step_us == usual.step_us == 1e3


def _int32(numbers: numpy.ndarray) -> numpy.ndarray:
    return numbers.astype(numpy.int64).astype(numpy.uint32).view(numpy.int32)


def test_a_record_is_followed_past_the_largest_step(device: str) -> None:
    """The device counts on from the largest int32: every step is taken once, whatever its number."""
    banks = make_banks(1, EXPERTS, device)
    pool = SlotPool(banks, 0, EXPERTS, TOP_K, device)
    buffers, mailbox = RouteBuffers.allocate(1, TOP_K, device), make_mailbox(1, TOP_K, device)
    record, taken = LayerRecord(pool.tensors), 0
    pool.set_cpu_share(0.0)  # nobody is asked, nobody answers
    pool.tensors.state[at.STEP.value] = 2**31 - 6
    record._known = 2**31 - 6
    for step in range(12):
        logits, hidden = torch.randn(1, EXPERTS, device=device), torch.zeros(1, HIDDEN, device=device)
        route(pool.tensors, 0, logits, hidden, TOP_K, True, buffers, mailbox)
        fetch(pool.tensors, 0, banks[0], buffers)
        join(pool.tensors, 0, mailbox, torch.zeros(1, HIDDEN, device=device))
        end_step(pool.tensors)
        if step % 4 == 3:
            record.queue()
            if device == "cuda":
                torch.cuda.synchronize()
            times = record.take(numpy.zeros((0, 5), numpy.int64))
            assert times is not None
            assert len(times) == 4
            taken += len(times)
    assert taken == 12
    assert int(pool.tensors.state[at.STEP.value]) < 0
