"""Probes in processes of their own: what breaks, what has no time left, and in which order things are told."""

from __future__ import annotations

import importlib
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ftlaunch.machine.probe import BY_NAME, COMPILES, GROUPS, PROBES, Asked, Probe
from ftlaunch.machine.run import LEAST_SECONDS, examine, known, run
from ftlaunch.machine.verdict import Finding, from_json, worst


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
    ("name", "quick", "verdict", "value", "mend"),
    [
        ("cpu", False, "warn", "not known: no answer within 0.5 s", ""),
        ("cpu", True, "note", "not known: no answer within 0.5 s", "ft doctor"),
        ("gpu_link", False, "note", "not known: no answer within 0.5 s", COMPILES),
        ("gpu", False, "bad", "the NVIDIA driver hangs: no answer within 0.5 s", "nvidia-smi"),
        ("gpu", True, "note", "not known: no answer within 0.5 s", "ft doctor"),
        ("server", False, "warn", "not known: no answer within 0.5 s", ""),
    ],
)
def test_silence(
    ft_home: Path, monkeypatch: pytest.MonkeyPatch, name: str, quick: bool, verdict: str, value: str, mend: str
) -> None:
    """A process that says nothing, in the place of each probe's."""
    command = ["sleep", "60"]
    monkeypatch.setattr(
        "ftlaunch.machine.run.process.start",
        lambda *words: subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True),
    )
    (finding,) = run([replace(BY_NAME[name], seconds=0.5, quick_seconds=0.5)], Asked(quick))[name]
    assert (finding.id, finding.verdict, finding.value) == (f"{name.partition('_')[0]}.answer", verdict, value)
    assert finding.mend == mend or (name == "gpu" and finding.mend.startswith(mend))
    assert finding.data == {"probe": name}


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
        module = importlib.import_module(f"ftlaunch.machine.{probe.name}")
        assert callable(getattr(module, "silent", None)) == probe.tells_silence
