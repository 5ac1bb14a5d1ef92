"""How long the measurement of both lanes takes, over links of any speed: replays of which a stand-in's clock says how
long they were, in place of kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system")
pytest.importorskip("ftengine._native", reason="the CPU's lane is not built")

from ftengine.experts import probe
from ftengine.experts.probe import ROUNDS, STAGING_BYTES, STAMPS, LaneProbe
from ftengine.experts.profile import Key, LaneProfile, lane_profile, measure_cpu, measure_lanes
from tests.experts.banks import bank
from tests.experts.test_profile import KEY

BAR = 3.0  # seconds
CPU = 30e9  # bytes a second
MIB = 1 << 20


class Machine(LaneProbe):
    """link, cpu: bytes a second. Experts of a made-up size, as many rounds and experts as they allow on a GPU."""

    def __init__(self, size: int, link: float, cpu: float = CPU) -> None:
        super().__init__([bank("nvfp4", experts=16)], 1, torch.float32, "cpu")
        self.block_bytes, self.link_rate, self.cpu_rate = size, link, cpu
        most = max(2, min(8, STAGING_BYTES // size))
        self.counts = tuple(count for count in (1, 2, 4, 8) if count <= most)
        self.clock = 0.0
        self.replays: list[int] = []  # of each measurement, with the one that warms up

    def _rounds_of(self, experts: int) -> int:
        self.device = torch.device("cuda")  # only what follows asks for it
        try:
            return super()._rounds_of(experts)
        finally:
            self.device = torch.device("cpu")

    def _captured(self, body: Callable[[], None]) -> Callable[[], None]:
        self.replays.append(0)
        self.eager = True  # a capture does the work once before
        return body

    def _queue(self, rounds: int, count: torch.Tensor, link: int, rings: bool) -> None:
        computed = int((self.wanted[0, 1] >= 0).sum())
        link_us, cpu_us = (
            link * self.block_bytes / self.link_rate * 1e6,
            computed * self.block_bytes / self.cpu_rate * 1e6,
        )
        table = torch.zeros(ROUNDS, STAMPS, dtype=torch.int64)
        table[:, 2], table[:, 3] = int(link_us * 1e3), int(max(link_us, cpu_us) * 1e3)
        self.times.copy_(table.view(-1))
        self.length = rounds * max(link_us, cpu_us) / 1e6

    def _seconds(self, run: Callable[[], None]) -> float:
        run()
        self.clock += self.length * (2 if self.eager else 1)
        self.eager = False
        self.replays[-1] += 1
        return self.length


def measured(machine: Machine) -> LaneProfile:
    with closing(machine):
        return measure_lanes(machine, KEY)


@pytest.mark.parametrize("size", [2 * MIB, 10 * MIB, 20 * MIB, 64 * MIB, 170 * MIB, 336 * MIB])
def test_it_ends_in_time_over_a_slow_link_and_still_knows_both_parts_of_a_cost(size: int) -> None:
    machine = Machine(size, 3e9)
    found = measured(machine)
    assert machine.clock <= BAR
    assert machine.spent == pytest.approx(machine.clock)
    assert found.link is not None
    assert found.link_beside is not None
    assert len(found.link.us) >= 2
    assert len(found.link_beside.us) >= 2
    assert found.link.b_us == pytest.approx(size / 3e9 * 1e6, rel=0.01)


class Busy(Machine):
    """Other programs compute while it has one expert on the CPU alone."""

    def _queue(self, rounds: int, count: torch.Tensor, link: int, rings: bool) -> None:
        super()._queue(rounds, count, link, rings)
        if not link and int((self.wanted[0, 1] >= 0).sum()) == 1:
            self.times.copy_((self.times.view(ROUNDS, STAMPS) * 20).view(-1))


@pytest.mark.parametrize(("size", "link", "cpu"), [(2 * MIB, 25e9, CPU), (20 * MIB, 3e9, 3e9), (64 * MIB, 3e9, CPU)])
def test_what_lies_on_no_line_is_measured_for_as_long_again(
    size: int, link: float, cpu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the most, and not a third time."""
    made: list[Machine] = []

    def next_one(*given: object) -> Machine:
        made.append(Busy(size, link, cpu))
        return made[-1]

    monkeypatch.setattr(probe, "LaneProbe", next_one)
    monkeypatch.setattr(Key, "of", staticmethod(lambda *given: KEY))
    _, how = lane_profile(None, [bank("nvfp4")], 1, torch.float32, "cuda")
    assert how == "measured now, while the machine was busy"
    assert len(made) == 2
    assert all(0 < machine.clock <= BAR for machine in made)
    assert made[1].clock == pytest.approx(made[0].clock)


@pytest.mark.parametrize(("link", "cpu"), [(3e9, 3e9), (1.5e9, CPU), (25e9, 1e9)])
def test_slower_lanes_are_measured_with_fewer_experts(link: float, cpu: float) -> None:
    machine = Machine(20 * MIB, link, cpu)
    found = measured(machine)
    assert machine.clock <= BAR
    assert found.costs is not None
    assert found.link is not None
    assert 1 in found.link.us
    assert len(found.link.us) < 4


@pytest.mark.parametrize("size", [2 * MIB, 20 * MIB, 64 * MIB])
def test_a_fast_machine_replays_as_often_as_ever(size: int) -> None:
    machine = Machine(size, 25e9)
    found = measured(machine)
    assert found.link is not None
    assert tuple(found.link.us) == machine.counts
    assert tuple(found.cpu.us) == machine.counts
    rounds = [machine._rounds_of(n) for n in machine.counts]
    expected = [1 + (5 if each > 1 else 2) for each in rounds]
    assert machine.replays[: len(expected)] == expected
    assert set(machine.replays) <= {3, 6}


def test_all_numbers_where_nobody_hurries() -> None:
    """As `ft bench bw` does, which has no start to hold up."""
    with closing(Machine(20 * MIB, 3e9, 1e9)) as machine:
        assert tuple(measure_cpu(machine, KEY).cpu.us) == machine.counts
