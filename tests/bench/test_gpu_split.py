"""A split that follows while fixed ones have its pool in between, on a simulated machine whose costs are known
(tests/experts/machine.py): the pool and the split are real ones, the records come by the device's ring."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy
import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system")
pytest.importorskip("ftengine._native", reason="the CPU's lane is not built")

from ftengine.bench.gpu_split import SWITCHED, Fixed, Following, report
from ftengine.bench.paired import Paired, Window
from ftengine.experts.layer_times import LayerTimes
from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.experts.split import LaneCosts
from ftengine.formats.format import BF16, ExpertLayout
from ftengine.kernels.triton import cache_state as at
from tests.experts.machine import Machine, Simulation

TOP_K, LAYERS = 8, 8
COSTS = LaneCosts(3.0, 37.0, 7.0, 34.0)
SLOW_CPU = dataclasses.replace(Machine(), cpu_rate=1 / 120, memory=1.0)  # most experts go over the link then
ON_CPU = Fixed(1.0, COSTS)


class Served:
    """Steps as a model makes them: the split is asked before each, and each is recorded where the last but 31 was."""

    def __init__(self, machine: Machine) -> None:
        bank = ExpertBank.allocate(ExpertLayout(32, 16, BF16, BF16), 1)
        self.pool = SlotPool(dict.fromkeys(range(LAYERS), bank), 1, TOP_K, TOP_K, "cpu", costs=COSTS)
        self.simulation = Simulation(machine, numpy.ones(TOP_K + 1), layers=LAYERS)
        self.experts = SimpleNamespace(pool=self.pool, lane=self, split=None)
        self.following = Following(self.experts, COSTS, self.steps, clock=lambda: self.simulation.now)
        self.logged = numpy.zeros((0, 5), numpy.int64)
        self.learnt: list[LayerTimes] = []
        learn = self.following.split.learn
        self.following.split.learn = lambda times: (self.learnt.append(times), learn(times))[1]

    def log(self) -> numpy.ndarray:
        return self.logged

    @property
    def table(self) -> numpy.ndarray:
        return self.pool.tensors.split.numpy()

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.experts.split is not None:
                self.experts.split.step()
            place = self.simulation.step % at.RECORDED.value
            tries = int(self.pool.tensors.control[at.TRIES.value])
            record, log = self.simulation.run(self.table, tries, 1)
            self.pool.tensors.record[place] = torch.from_numpy(record)[place]
            self.logged = numpy.concatenate((self.logged, log))[-4096:]

    def serve(self, seconds: float) -> None:
        end = self.simulation.now + seconds
        while self.simulation.now < end:
            self.steps(16)


@pytest.fixture(scope="module")
def served() -> Served:
    made = Served(SLOW_CPU)
    made.serve(2.0)
    return made


def test_the_following_split_has_its_tables_again_at_once(served: Served) -> None:
    """And meanwhile the pool does what the fixed one says, without trials."""
    pool, split = served.pool, served.following.split
    pool.set_background(0.25)  # as if it had found a slow link
    before, moves, unmoved = served.table.copy(), split.moves.count, split.unmoved
    tries, costs = float(pool.tensors.control[at.TRIES.value]), pool.costs
    assert moves > 0, "it follows costs of its own"
    assert tries > 0
    with served.following.set_aside(ON_CPU):
        assert served.experts.split is None
        assert (served.table == 0).all(), "nothing is fetched"
        assert (pool.background, float(pool.tensors.control[at.TRIES.value])) == (1.0, 0.0)
        served.serve(3.0)
    assert (served.table == before).all()
    assert (pool.background, float(pool.tensors.control[at.TRIES.value])) == (0.25, tries)
    assert (pool.cpu_share, pool.costs) == (None, costs)
    assert served.experts.split is split
    assert (split.moves.count, split.unmoved) == (moves, unmoved), "no time has passed for it"


def test_it_learns_nothing_of_the_fixed_one(served: Served) -> None:
    """Of six missing experts its own splits and their trials fetch some; the fixed one fetches none."""
    served.learnt.clear()
    for _ in range(3):
        with served.following.set_aside(ON_CPU):
            served.steps(64)
        served.serve(0.3)
    learnt = [times for times in served.learnt if len(times)]
    assert sum(len(times) for times in learnt) > 1000
    for times in learnt:
        assert (times.fetched[times.misses >= 6] > 0).all()
    assert (served.table[:, 0, 6 : TOP_K + 1] > 0).all(), "which is what the above tells apart"


def test_it_stays_right_where_fixed_ones_come_in_between(served: Served) -> None:
    """Pairs as they are measured, on a machine that does not change: the split is as good after as before."""
    simulation = served.simulation

    def layer_us() -> float:
        return simulation.expected(served.table[0, 0])

    served.serve(1.0)
    moves = served.following.split.moves.count
    for _ in range(4):
        with served.following.set_aside(ON_CPU):
            served.serve(0.5)
        served.serve(0.5)
    assert layer_us() < 1.02 * simulation.best_share()
    assert served.following.split.moves.count - moves <= 2


def test_a_new_load_is_followed_after_fixed_ones() -> None:
    """The load comes while a fixed one has the pool: what was learnt before it is not what is true after."""
    served = Served(Machine())
    served.serve(1.0)
    served.simulation.machine = SLOW_CPU
    with served.following.set_aside(Fixed(0.5, COSTS)):
        served.serve(1.0)
    served.serve(2.0)
    assert simulation_off(served) < 1.05
    assert str(served.following).startswith(f"{served.following.split.moves.count} moves; link ")


def simulation_off(served: Served) -> float:
    return served.simulation.expected(served.table[0, 0]) / served.simulation.best_share()


def test_steps_between_two_splits_are_as_many_as_the_device_records() -> None:
    assert at.RECORDED.value <= SWITCHED


def test_what_is_said_of_both() -> None:
    windows = [Window(rate, 1.25) for rate in (200.0, 210.0, 190.0, 200.0)]
    slower = [Window(0.98 * window.rate, 1.5) for window in windows]
    assert report(Paired(windows, slower), str(Fixed(0.25, COSTS))) == (
        "following / CPU 25%: 0.980, quartiles 0.980 to 0.980 of 4 pairs; CPU 25% 200.0 tok/s with 1.25 misses a "
        "layer; following 196.0 tok/s with 1.50 misses a layer"
    )
