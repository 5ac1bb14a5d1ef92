"""Probes in processes of their own: what breaks, what has no time left, and in which order things are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftlaunch.machine.probe import BY_NAME, GROUPS, PROBES, Asked, Probe
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
        __import__(f"ftlaunch.machine.{probe.name}")
