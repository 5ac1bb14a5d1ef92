"""Times through which no line goes, as of a busy machine: taken once more, used at the worst, never kept or read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system")
pytest.importorskip("ftengine._native", reason="the CPU's lane is not built")

from ftengine.experts import probe as probes
from ftengine.experts.probe import Times
from ftengine.experts.profile import FILE_NAME, Key, LaneProfile, LaneTimes, crooked, find, lane_profile, read, write
from tests.experts.banks import bank
from tests.experts.test_profile import KEY

LANES = ("cpu", "link", "cpu_beside", "link_beside")
WHERE = {
    "cpu": "on the CPU",
    "link": "over the link",
    "cpu_beside": "on the CPU beside the link",
    "link_beside": "over the link beside the CPU",
}
LATE = 20.0  # times that one expert takes as long as it should, where the machine is busy


class Probe:
    """Lanes of 10 + 20 n microseconds, `slow` times as much; one expert of the lane `busy` takes LATE times as long."""

    counts = (1, 2, 4, 8)
    spent = 0.0

    def __init__(self, busy: str = "", slow: float = 1.0) -> None:
        self.banks = [bank("nvfp4", experts=16)]
        self.busy, self.slow, self.closed = busy, slow, False

    def us(self, lane: str, n: int) -> float:
        return self.slow * (10.0 + 20.0 * n) * (LATE if lane == self.busy and n == 1 else 1.0)

    def cpu(self, n: int) -> float:
        return self.us("cpu", n)

    def link(self, n: int) -> float:
        return self.us("link", n)

    def both(self, link: int, cpu: int) -> Times:
        return Times(self.us("link_beside", link), self.us("cpu_beside", cpu), 0.0)

    def handshake(self) -> float:
        return 6.0

    def close(self) -> None:
        self.closed = True


class Machine:
    """What `lane_profile` makes of these probes, one after the other, for the key `key`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path | None, key: Key = KEY) -> None:
        self.folder = folder
        self.waiting: list[Probe] = []
        self.used: list[Probe] = []
        monkeypatch.setattr(probes, "LaneProbe", self._next)
        monkeypatch.setattr(Key, "of", staticmethod(lambda *given: key))

    def _next(self, *given: object) -> Probe:
        self.used.append(self.waiting.pop(0))
        return self.used[-1]

    def start(self, *found: Probe, readable: bool = True) -> tuple[LaneProfile, str]:
        self.waiting, self.used = list(found), []
        return lane_profile(self.folder, [bank("nvfp4")], 1, torch.bfloat16, "cuda", readable=readable)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Machine:
    caplog.set_level(logging.INFO, "ftengine.profile")
    return Machine(monkeypatch, tmp_path)


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


def test_a_quiet_machine_is_measured_once(machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, how = machine.start(Probe())
    assert how == "measured now"
    assert read(tmp_path, KEY) == made
    assert [each.closed for each in machine.used] == [True]
    assert not caplog.records
    assert machine.start() == (made, f"measured on {made.measured}")


@pytest.mark.parametrize("lane", LANES)
def test_what_lies_on_no_line_is_measured_once_more(
    lane: str, machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, how = machine.start(Probe(lane), Probe())
    assert how == "measured now"
    assert not crooked(made)
    assert read(tmp_path, KEY) == made
    assert [each.closed for each in machine.used] == [True, True]
    assert levels(caplog) == ["INFO"]
    assert f"measuring once more: 1 expert took 600 us {WHERE[lane]}, where the line through all says " in caplog.text


@pytest.mark.parametrize("lane", LANES)
def test_what_lies_on_none_again_is_used_and_not_kept(
    lane: str, machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The later of the two; the next start measures again."""
    made, how = machine.start(Probe("cpu"), Probe(lane, slow=2.0))
    assert how == "measured now, while the machine was busy"
    times = getattr(made, lane)
    assert times.us == {1: 1200.0, 2: 100.0, 4: 180.0, 8: 340.0}
    assert levels(caplog) == ["INFO", "WARNING"]
    reason = f"1 expert took 1200 us {WHERE[lane]}, where the line through all says {times.a_us + times.b_us:.0f}"
    told = f"what was measured is not kept: {reason}; this start goes by it, the next one measures again"
    assert caplog.records[-1].getMessage() == told
    assert not (tmp_path / FILE_NAME).exists()
    again, how = machine.start(Probe())
    assert (how, read(tmp_path, KEY)) == ("measured now", again)


def test_a_sound_one_that_was_kept_is_not_lost(machine: Machine, tmp_path: Path) -> None:
    """Of other threads, say: what is not kept takes nobody's place."""
    other = msgspec.structs.replace(KEY, threads=3)
    times = LaneTimes.through({1: 30.0, 2: 50.0})
    kept = LaneProfile(other, "2026-01-31", 100, 6.0, times, times, times, times)
    write(tmp_path, kept)
    machine.start(Probe("link"), Probe("link"))
    assert read(tmp_path, other) == kept
    assert len(json.loads((tmp_path / FILE_NAME).read_text())["lanes"]) == 1


def test_one_that_was_kept_is_left_aside_and_replaced(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As files of before may hold it. Said also where nearer ones of other machines lie beside it."""
    busy = {1: 600.0, 2: 50.0, 4: 90.0, 8: 170.0}
    times = LaneTimes.through(busy)
    quiet = LaneTimes.through({n: 10.0 + 20.0 * n for n in busy})
    write(tmp_path, LaneProfile(KEY, "2026-01-31", 100, 6.0, quiet, times, quiet, quiet))
    write(tmp_path, LaneProfile(msgspec.structs.replace(KEY, threads=3), "2026-01-31", 100, 6.0, quiet))
    line = times.a_us + times.b_us
    reason = f"lies on no line: 1 expert took 600 us over the link, where the line through all says {line:.0f}"
    assert find(tmp_path, KEY) == (None, reason)
    made, how = machine.start(Probe())
    assert how == "measured now"
    assert caplog.messages == [f"what {tmp_path / FILE_NAME} holds {reason}: measuring anew"]
    assert read(tmp_path, KEY) == made
    assert len(json.loads((tmp_path / FILE_NAME).read_text())["lanes"]) == 2


def test_the_cpu_alone_where_the_gpu_cannot_read(machine: Machine, tmp_path: Path) -> None:
    made, how = machine.start(Probe("cpu"), Probe("link"), readable=False)
    assert (how, made.link, crooked(made)) == ("measured now", None, "")
    assert read(tmp_path, KEY) == made
    assert machine.start(Probe("cpu"), Probe("cpu"), readable=True)[1] == "measured now, while the machine was busy"
    assert read(tmp_path, KEY) == made


def test_without_a_folder(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(monkeypatch, None)
    assert machine.start(Probe("cpu"), Probe())[1] == "measured now"
    assert machine.start(Probe("cpu"), Probe("cpu"))[1] == "measured now, while the machine was busy"


def test_the_interpreters_times_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a program that stands for a GPU no line is expected."""
    machine = Machine(monkeypatch, tmp_path, msgspec.structs.replace(KEY, gpu="none", driver="none"))
    made, how = machine.start(Probe("cpu"))
    assert (how, len(machine.used)) == ("measured now", 1)
    assert crooked(made)
    assert (tmp_path / FILE_NAME).exists()


def test_how_far_a_line_may_miss_a_point() -> None:
    def missed(us: float) -> str:
        return crooked(LaneProfile(KEY, "2026-01-31", 100, 6.0, LaneTimes({1: 30.0, 2: us}, 10.0, 20.0)))

    assert missed(99.9) == missed(25.1) == ""
    assert missed(100.1) == "2 experts took 100 us on the CPU, where the line through all says 50"
    assert missed(24.9) == "2 experts took 25 us on the CPU, where the line through all says 50"
