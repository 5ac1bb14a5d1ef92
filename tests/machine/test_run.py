"""Probes in processes of their own: what breaks, what has no time left, and in which order things are told."""

from __future__ import annotations

import importlib
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftlaunch.machine.probe import BY_NAME, COMPILES, GROUPS, PROBES, Asked, Probe
from ftlaunch.machine.run import LEAST_SECONDS, QUICK_SECONDS, examine, known, run
from ftlaunch.machine.verdict import Finding, from_json, worst
from tests.support.timing import quickest, seconds

SILENT = ("sleep", "60")
ASKS = ("sh", "-c", """echo '{"waits": "the NVIDIA driver"}'; exec sleep 60""")  # as a probe that then hears nothing


def in_place(monkeypatch: pytest.MonkeyPatch, **commands: tuple[str, ...]) -> list[tuple[str, float]]:
    """Commands in the place of probes' processes, by name; `others` for the rest. Gives what was started, and when."""
    started: list[tuple[str, float]] = []

    def start(module: str, name: str, asked: str) -> subprocess.Popen[bytes]:
        started.append((name, time.monotonic()))
        command = commands.get(name, commands["others"])
        return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)

    monkeypatch.setattr("ftlaunch.machine.run.process.start", start)
    return started


def test_a_probe_that_breaks() -> None:
    """As where a library that it imports is damaged."""
    broken = Probe("nothing", "facts", "nothing at all", 5.0, 5.0)
    (finding,) = run([broken], Asked())["nothing"]
    assert finding.verdict == "warn"
    assert finding.value.startswith("not known: what asked ended with status")


def test_no_time_is_left() -> None:
    (finding,) = run([BY_NAME["cpu"]], Asked(), left=LEAST_SECONDS / 2)["cpu"]
    assert (finding.id, finding.verdict) == ("cpu.answer", "note")
    assert finding.value == "not known: no time was left for it"


@pytest.mark.parametrize(
    ("name", "command", "quick", "verdict", "value", "mend"),
    [
        ("cpu", SILENT, False, "warn", "not known: no answer within 0.5 s", ""),
        ("cpu", SILENT, True, "note", "not known: no answer within 0.5 s", "ft doctor"),
        ("gpu_link", SILENT, False, "note", "not known: no answer within 0.5 s", COMPILES),
        ("gpu", ASKS, False, "bad", "the NVIDIA driver hangs: no answer within 0.5 s", "nvidia-smi"),
        ("gpu", ASKS, True, "warn", "not known: the NVIDIA driver gave no answer within 0.5 s", "ft doctor"),
        ("gpu", SILENT, False, "warn", "not known: no answer within 0.5 s", ""),
        ("gpu", SILENT, True, "note", "not known: no answer within 0.5 s", "ft doctor"),
        ("server", SILENT, False, "warn", "not known: no answer within 0.5 s", ""),
    ],
)
def test_silence(
    ft_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    command: tuple[str, ...],
    quick: bool,
    verdict: str,
    value: str,
    mend: str,
) -> None:
    """A process that finds nothing, in the place of each probe's. A driver is blamed only where it was asked."""
    in_place(monkeypatch, others=command)
    (finding,) = run([replace(BY_NAME[name], seconds=0.5, quick_seconds=0.5)], Asked(quick))[name]
    assert (finding.id, finding.verdict, finding.value) == (f"{name.partition('_')[0]}.answer", verdict, value)
    assert finding.mend == mend or (mend == "nvidia-smi" and finding.mend.startswith(mend))
    assert finding.data == {"probe": name}


def test_a_quick_look_ends_in_time_whatever_is_silent(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each probe by its own limit and all of them by one; those for which nothing is left are told, too."""
    in_place(monkeypatch, others=SILENT)
    looks: list[list[Finding]] = []
    limit = QUICK_SECONDS + 0.3
    assert limit < 2
    assert quickest(lambda: seconds(lambda: looks.append(examine(Asked(quick=True)))), limit) < limit
    told = {finding.data["probe"]: finding.value for finding in looks[-1] if finding.id.endswith(".answer")}
    quick = {probe.name for probe in PROBES if probe.quick_seconds is not None and probe.stage != "model"}
    assert quick - set(told) <= {"server"}, "whose records tell without a process"
    assert told["catalogue"] == "not known: no time was left for it"


def test_the_disk_is_read_while_a_driver_is_waited_for(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --quick; else nothing but what is measured may use this machine."""

    def order(asked: Asked) -> tuple[list[str], float]:
        """What was started behind the facts, and seconds from the GPU's probe to the disk's reading."""
        started = in_place(monkeypatch, gpu=ASKS, others=("true",))
        examine(asked)
        when: dict[str, Any] = dict(started)
        return [name for name in when if name in ("disk_read", "catalogue")], when["disk_read"] - when["gpu"]

    given = BY_NAME["gpu"].quick_seconds
    assert given is not None
    limit = 0.75 * given
    assert quickest(lambda: order(Asked(quick=True))[1], limit) < limit
    assert order(Asked(quick=True))[0] == ["disk_read", "catalogue"]
    monkeypatch.setattr("ftlaunch.machine.run.PROBES", [replace(p, seconds=min(p.seconds, 1.5)) for p in PROBES])
    names, waited = order(Asked())
    assert names == ["disk_read", "catalogue"]
    assert waited > 1.4  # the time of all begins a moment before the first of them


def test_only_some(ft_home: Path) -> None:
    found = examine(Asked(quick=True), only=("server", "cpu"))
    assert [finding.group for finding in found] == sorted((finding.group for finding in found), key=list(GROUPS).index)
    assert {finding.group for finding in found} == {"cpu", "server"}


def test_a_folder_of_the_users_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """People run ft inside their own repositories."""
    (tmp_path / "ftlaunch").mkdir()
    (tmp_path / "ftlaunch" / "__init__.py").write_text("raise SystemExit(9)")
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert worst(run([BY_NAME["cpu"]], Asked(quick=True))["cpu"]) in ("ok", "note", "warn")


def test_findings_cross_whole() -> None:
    finding = Finding("memory.read", "reading", "34 GB/s", data={"bytes_per_second": 34e9}).but("warn", "speed", "ps")
    assert from_json(finding.as_json()) == finding
    assert known([[finding], [Finding("memory.read", "again", "1", data={})]]) == {"memory.read": finding.data}


@pytest.mark.parametrize("text", [{}, [], {"id": 1}, None, 7, "x"])
def test_what_is_no_finding_is_refused(text: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_json(text)  # type: ignore[arg-type]


def test_every_probe_is_there() -> None:
    assert {probe.name.partition("_")[0] for probe in PROBES} == set(GROUPS)
    for probe in PROBES:
        assert callable(probe.run)
        importlib.import_module(f"ftlaunch.machine.{probe.name}")
        if probe.silence:
            assert callable(importlib.import_module(f"ftlaunch.machine.{probe.silence}").silent)
