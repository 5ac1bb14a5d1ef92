"""What is told of a reading that others disturbed, of files that are left aside, and of servers that nobody asked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ftengine.experts import profile
from ftlaunch.cli.fit import _told
from ftlaunch.machine import ignored, predict, served, server
from ftlaunch.machine.computing import Computing
from ftlaunch.machine.fit import Fit
from ftlaunch.machine.probe import BY_NAME, Asked
from ftlaunch.machine.run import run
from ftlaunch.machine.speed import Machine
from ftlaunch.machine.verdict import Finding
from ftlaunch.servers import ServerRecord, publish
from ftlaunch.servers.registry import port_path

BUSY = Computing(others=1.6, programs={"cc1plus": 1.6}, cpus=2)
WHO = "other programs with 1.6 of 2 CPUs (cc1plus)"
CPU = Fit("cpu", threads=2)


class Readings:
    """Of memory, one after the other, and who computed during each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *readings: tuple[float, Computing]) -> None:
        self._rates: Iterator[float] = iter([rate for rate, _ in readings])
        self._seen = iter([who for _, who in readings])
        monkeypatch.setattr(predict, "Watch", lambda root, servers: self)
        monkeypatch.setattr(predict.memory_read, "short", lambda threads=None: next(self._rates))

    def seen(self) -> Computing:
        return next(self._seen)

    @property
    def left(self) -> int:
        return len(list(self._rates))


def test_a_quiet_reading_is_the_only_one(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = Readings(monkeypatch, (30e9, Computing()), (40e9, Computing()))
    machine, who = predict.undisturbed(Asked(), CPU)
    assert (machine.host, machine.lane, who, readings.left) == (30e9, 30e9, "", 1)


@pytest.mark.parametrize(("second", "kept"), [(20e9, 30e9), (40e9, 40e9)])
@pytest.mark.parametrize(("then", "who"), [(BUSY, WHO), (Computing(), "")])
def test_a_disturbed_reading_is_repeated_and_the_better_one_kept(
    second: float, kept: float, then: Computing, who: str, ft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Readings(monkeypatch, (30e9, BUSY), (second, then))
    machine, told = predict.undisturbed(Asked(), CPU)
    assert (machine.host, machine.lane, told) == (kept, kept, who)


def test_what_the_doctor_has_read_is_not_read_again(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Readings(monkeypatch)
    asked = Asked(known={"memory.read": {"bytes_per_second": 3e10}})
    machine, who = predict.undisturbed(asked, CPU)
    assert isinstance(machine, Machine)
    assert (machine.host, who) == (3e10, "")


def test_who_disturbed_is_told_once(ft_home: Path) -> None:
    plain = Finding("model.speed", "speed", "60 to 120 tokens/s", data={"prediction": {}})
    noted = predict._disturbed(plain, WHO)
    assert (noted.verdict, noted.cost) == ("note", f"computed while memory was read: {WHO}; it may be more")
    assert predict._disturbed(plain, "") == plain
    judged = plain.but("note", "3 servers were slower")
    assert predict._disturbed(judged, WHO) == judged
    assert list(_told({"model.speed": noted})) == [f"Predicted: 60 to 120 tokens/s ({noted.cost})"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b'{"version": ', "it is damaged"),
        (b"\xff\x00\x01", "it is damaged"),
        (b"[]", "it is damaged"),
        (b'{"version": 2, "models": 7}', "it is damaged"),
        (b'{"version": 99, "models": [], "lanes": []}', "it is of version 99, not "),
    ],
)
@pytest.mark.parametrize("name", ["speed.json", "profile.json"])
def test_a_file_that_is_left_aside(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (found,) = ignored.findings(tmp_path)
    assert (found.id, found.verdict) == ("model.ignored", "note")
    assert found.value.startswith(f"{path}: {reason}")
    assert found.mend == f"rm {path}; ft writes it anew"


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "speed.json").mkdir()
    (found,) = ignored.findings(tmp_path)
    assert found.mend.startswith("rm -r ")


def test_sound_files_and_none(ft_home: Path) -> None:
    """As those that write them do."""
    folder = ft_home / "cache"
    assert list(ignored.findings(folder)) == []
    served.keep(served.Entry("/m", "cpu"))
    key = profile.Key("none", "none", "cpu", "avx2", 1, "nvfp4", "nvfp4", 64, 48, "float32")
    profile.write(folder, profile.LaneProfile(key, "2026-01-31", 100, 6.0, profile.LaneTimes({1: 30.0}, 10.0, 20.0)))
    assert {path.name for path in folder.glob("*.json")} == {"speed.json", "profile.json"}
    assert list(ignored.findings(folder)) == []


def test_servers_that_were_not_asked_in_time(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine leaves --quick no time: the lock of a server tells who holds the port."""
    late = replace(BY_NAME["server"], quick_seconds=0.5)
    monkeypatch.setattr("ftlaunch.machine.run.process.start", _sleeper)
    (unknown,) = run([late], Asked(quick=True))["server"]
    assert (unknown.id, unknown.mend) == ("server.answer", "ft doctor")
    record = ServerRecord("x", os.getpid(), "127.0.0.1", server.DEFAULT_PORT, "demo", "demo", None, 1.0, None, None)
    with publish(record):
        where = {"pid": os.getpid(), "host": "127.0.0.1", "port": record.port}
        port_path("x").write_text(json.dumps(where))
        running, port = run([late], Asked(quick=True))["server"]
    assert running.data == {"servers": [f"demo on {record.port}"]}
    assert (port.id, port.verdict) == ("server.port", "ok")
    assert port.value == f"{record.port}: ft's server of demo (pid {os.getpid()})"


def _sleeper(*words: str) -> object:
    import subprocess

    return subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, start_new_session=True)
