"""The split that follows the lanes' costs, on a simulated machine whose best split is known (machine.py)."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy
import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system")
pytest.importorskip("ftengine._native")

from ftengine.errors import ConfigError
from ftengine.experts.layer_times import layer_times
from ftengine.experts.learner import SLOWED, Line
from ftengine.experts.online import OnlineSplit, asked_for
from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.experts.split import LaneCosts
from ftengine.formats.format import BF16, ExpertLayout
from ftengine.kernels.triton import cache_state as at
from tests.experts.machine import Machine, Simulation

TOP_K, LAYERS, LOOK = 8, 40, 16  # steps between two looks
SERVER = Machine()
PROFILE = LaneCosts(3.0, 37.0, 7.0, 34.0)  # as its probe would say: both lanes busy
LOADS = {
    "memory halved": dataclasses.replace(SERVER, memory=1 / 60),
    "CPU and memory": dataclasses.replace(SERVER, memory=1 / 50, cpu_rate=1 / 70),
    "link a quarter": dataclasses.replace(SERVER, link_rate=1 / 150),
    "cores shared": dataclasses.replace(SERVER, late=0.6, late_us=3000.0),
}


def misses_of(rows: int, missing: float, spread: float = 4.0) -> numpy.ndarray:
    """Beta-binomial: layers differ in how much they miss."""
    count, a, b = rows * TOP_K, missing * spread, (1 - missing) * spread

    def beta(x: float, y: float) -> float:
        return math.exp(math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y))

    return numpy.array([math.comb(count, i) * beta(i + a, count - i + b) / beta(a, b) for i in range(count + 1)])


MISSES = {"25 % slots": misses_of(1, 0.15), "10 % slots": misses_of(1, 0.35), "none": numpy.eye(TOP_K + 1)[TOP_K]}


class Served:
    """A split that follows a simulation; its pool is a real one."""

    def __init__(self, simulation: Simulation) -> None:
        bank = ExpertBank.allocate(ExpertLayout(32, 16, BF16, BF16), 1)
        banks = dict.fromkeys(range(LAYERS), bank)
        self.simulation = simulation
        self.pool = SlotPool(banks, 1, TOP_K, TOP_K, "cpu", costs=PROFILE)
        self.split = OnlineSplit(self.pool, None, clock=lambda: simulation.now)

    @property
    def table(self) -> numpy.ndarray:
        return self.pool.tensors.split.numpy()

    @property
    def layer_us(self) -> float:
        """Expected, with the split in use."""
        return self.simulation.expected(self.table[0, self.simulation.rows - 1])

    def serve(self, seconds: float) -> list[tuple[float, float]]:
        """Points of time and `layer_us`, from now on."""
        simulation, points = self.simulation, []
        start = simulation.now
        while simulation.now - start < seconds:
            known, tries = simulation.step, int(self.pool.tensors.control[at.TRIES.value])
            self.split.learn(layer_times(*simulation.run(self.table, tries, LOOK, self.pool.prefetch), known))
            points.append((simulation.now - start, self.layer_us))
        return points


def settled(points: list[tuple[float, float]], best: float) -> float:
    """When it was the last time further than 5 % off."""
    return max((at for at, us in points if us > 1.05 * best), default=0.0)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kind", ["25 % slots", pytest.param("10 % slots", marks=pytest.mark.slow), "none"])
def test_it_settles_when_a_load_comes_and_when_it_goes(kind: str, load: str) -> None:
    """Within 5 % of the best fixed share in 10 s, and from then on never below the better lane alone."""
    simulation = Simulation(SERVER, MISSES[kind])
    served = Served(simulation)
    served.serve(3.0)
    assert served.layer_us < 1.05 * simulation.best_share()
    for machine in (LOADS[load], SERVER):
        simulation.machine = machine
        points = served.serve(11.0)
        assert settled(points, simulation.best_share()) < 10.0
        assert points[-1][1] < 1.01 * simulation.best_lane() + 1e-6


@pytest.mark.parametrize("load", ["memory halved", "link a quarter", "cores shared"])
def test_several_rows_have_a_split_of_their_own(load: str) -> None:
    """Four rows miss up to 32 experts a layer, and an expert that two of them use costs the CPU more."""
    simulation = Simulation(dataclasses.replace(SERVER, row=6.0), misses_of(4, 0.4), rows=4)
    served = Served(simulation)
    for machine in (simulation.machine, dataclasses.replace(LOADS[load], row=6.0), simulation.machine):
        simulation.machine = machine
        assert settled(served.serve(10.0), simulation.best_share()) < 9.0


def test_hiccups_and_noise_move_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A pause of 5 ms about every second, and none of a constant machine's moves after the first seconds."""
    simulation = Simulation(SERVER, MISSES["25 % slots"])
    served = Served(simulation)
    served.serve(3.0)
    before = served.split.moves.count
    with caplog.at_level(logging.INFO):
        served.serve(20.0)
    assert served.split.moves.count - before <= 1
    assert served.split.unmoved > 10
    assert len(caplog.records) <= 1


@pytest.mark.parametrize("kind", ["25 % slots", "10 % slots"])
def test_lanes_that_are_as_fast_as_each_other_move_nothing(kind: str) -> None:
    """Which split is the best one by a little is noise: it would move five times and more in this time."""
    equal = dataclasses.replace(SERVER, cpu_start=3.0, cpu_rate=1 / 37, memory=2 / 37, gpu=0.0)
    served = Served(Simulation(equal, MISSES[kind]))
    served.serve(4.0)
    before = served.split.moves.count
    served.serve(12.0)
    assert served.split.moves.count - before <= 1


def test_one_late_layer_moves_no_line() -> None:
    """5 ms where a tenth of one was expected: it is counted apart, and the line stays what the others say."""
    line, random = Line([8.0, 25.0, 0.0]), numpy.random.default_rng(0)
    x = numpy.stack([numpy.ones(LAYERS), random.integers(1, 9, LAYERS), numpy.zeros(LAYERS)], 1)
    y = x @ numpy.array([8.0, 25.0, 0.0])
    y[7] = 5000.0
    line.add(x, y, 1.0, SLOWED)
    assert line.theta == pytest.approx([8.0, 25.0, 0.0], abs=1e-6)
    assert line.late == 0.0, "once is chance"


def test_trials_cost_little_and_say_what_the_lanes_cost() -> None:
    """Under half a percent or so of the layers' time, and the machine's own numbers, known or not at the start."""
    simulation = Simulation(SERVER, MISSES["25 % slots"])
    served = Served(simulation)
    served.serve(4.0)
    tried = [simulation.expected(row) for row in served.table[1:, 0]]
    every = int(served.pool.tensors.control[at.TRIES.value])
    assert 4 / every * (numpy.mean(tried) / served.layer_us - 1) < 0.008
    costs = served.split.learner.costs
    assert costs.b_link == pytest.approx(37.0, rel=0.1)
    assert costs.cpu(4) == pytest.approx(7.0 + 4 * 22.0, rel=0.1)


@pytest.mark.parametrize("kind", MISSES)
@pytest.mark.parametrize(("link_us", "expected"), [(1500, 0), (400, 0), (150, 0), (37, 2), (18, 3)])
def test_as_many_experts_are_prefetched_as_the_link_has_room_for(link_us: int, expected: int, kind: str) -> None:
    """In the rest of a layer's time: waiting for copies makes no room for them. Steps are the faster for it, or nearly
    as fast, and never more than what was asked for is prefetched."""
    mean = []
    for first, most in ((0, 0), (4, 3)):
        simulation = Simulation(dataclasses.replace(SERVER, link_rate=1 / link_us), MISSES[kind])
        served = Served(simulation)
        served.split = OnlineSplit(served.pool, None, clock=lambda: simulation.now, most_prefetched=most)  # noqa: B023
        served.pool.set_prefetch(first)
        served.serve(3.0)
        start, steps = simulation.now, simulation.step
        served.serve(3.0)
        mean.append((simulation.now - start) / (simulation.step - steps))
    assert mean[1] < 1.04 * mean[0]
    if kind == "25 % slots":
        assert abs(served.pool.prefetch - expected) <= (0 if link_us > 100 else 1)
        assert (mean[1] < 0.95 * mean[0]) == (link_us < 100)


def test_a_link_with_room_for_most_of_an_expert_prefetches_none() -> None:
    """Every layer would wait for it; of a second one only those that miss two."""
    simulation = Simulation(dataclasses.replace(SERVER, link_rate=1 / 90), MISSES["25 % slots"])
    served = Served(simulation)
    served.split = OnlineSplit(served.pool, None, clock=lambda: simulation.now, most_prefetched=3)
    served.pool.set_prefetch(3)
    served.serve(3.0)
    assert served.pool.prefetch == 0


def test_copies_in_the_background_leave_room_on_a_slow_link() -> None:
    """What is copied behind a layer takes less time than the layer; it is as before when the link is."""
    simulation = Simulation(LOADS["link a quarter"], MISSES["25 % slots"])
    served = Served(simulation)
    served.serve(4.0)
    assert 0 < served.pool.background * 150 < 45 + served.layer_us
    simulation.machine = SERVER
    served.serve(4.0)
    assert served.pool.background == 1.0


def test_a_move_is_told_and_its_costs_are_in_use(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(SERVER, MISSES["10 % slots"])
    served = Served(simulation)
    served.serve(3.0)
    simulation.machine = LOADS["link a quarter"]
    with caplog.at_level(logging.INFO):
        served.serve(4.0)
    assert "the split of missing experts moved: n take" in caplog.records[0].message
    assert served.pool.costs.link(1) == pytest.approx(153, rel=0.25)
    assert served.split.unmoved < 4.0


def test_a_record_that_says_nothing_changes_nothing() -> None:
    """Steps without missing experts; a lane's log that has gone on without them."""
    nothing = numpy.eye(TOP_K + 1)[0]
    simulation = Simulation(SERVER, nothing)
    served = Served(simulation)
    before = served.table.copy()
    served.serve(2.0)
    assert (served.table == before).all()
    assert served.split.learner.costs.link(1) == PROFILE.link(1)
    record, _ = simulation.run(before, 0, LOOK)
    assert len(layer_times(record, numpy.zeros((0, 5), numpy.int64), simulation.step)) == 0


@pytest.mark.parametrize(("text", "found"), [("online", True), ("fixed", False), ("0.25", 0.25), ("1", 1.0)])
def test_the_environment_says_which(text: str, found: float | bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_SPLIT", text)
    assert asked_for() == found
    monkeypatch.delenv("FT_SPLIT")
    assert asked_for() is True


@pytest.mark.parametrize("text", ["", "1.5", "nan", "-1", "none"])
def test_another_environment_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_SPLIT", text)
    with pytest.raises(ConfigError, match="FT_SPLIT is"):
        asked_for()


def test_the_table_stays_within_what_is_missing() -> None:
    """Every entry of every table is a number of the missing experts, whatever the costs are."""
    simulation = Simulation(SERVER, MISSES["none"])
    served = Served(simulation)
    misses = torch.arange(served.table.shape[2])
    for machine in LOADS.values():
        simulation.machine = machine
        served.serve(1.0)
        split = served.pool.tensors.split
        assert bool((split >= 0).all())
        assert bool((split <= misses).all())
