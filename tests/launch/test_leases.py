"""Servers that launches start, share, leave and lose: real ones, with the scripted model."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.place import Place, is_alive, until
from tests.support.serving import SCRIPTED_CHECKPOINT

LAUNCH = ("launch", "claude", "--model", str(SCRIPTED_CHECKPOINT))


@pytest.fixture(autouse=True)
def _nothing_stays(place: Place) -> Iterator[None]:
    yield
    place.run("stop", "--all")


def waiting(place: Place, name: str) -> tuple[subprocess.Popen[str], Path]:
    """A launch whose agent runs until `<report>.go` appears."""
    report = place.report.with_name(name)
    return place.start(*LAUNCH, DOUBLE_DOES="wait", DOUBLE_REPORT=str(report)), report


def facts(place: Place, process: subprocess.Popen[str], report: Path) -> dict[str, Any]:
    """What the agent was given; at once what the launch said, if it ended without one."""
    until(lambda: report.exists() or process.poll() is not None, f"{report} appears")
    assert report.exists(), process.communicate()
    return place.seen(report)


def end(process: subprocess.Popen[str], report: Path) -> None:
    report.with_suffix(".go").touch()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error


def test_two_launches_share_one_server_and_the_last_one_stops_it(place: Place) -> None:
    first, first_report = waiting(place, "first")
    second, second_report = waiting(place, "second")
    seen = [facts(place, *launch) for launch in ((first, first_report), (second, second_report))]
    addresses = {each["environment"]["ANTHROPIC_BASE_URL"] for each in seen}
    assert len(addresses) == 1
    [server] = place.servers()
    assert (server["url"], server["launches"]) == (addresses.pop(), 2)
    assert Path(server["log"]).is_relative_to(place.ft_home)
    end(first, first_report)
    until(lambda: [s["launches"] for s in place.servers()] == [1], "the first launch leaves")
    end(second, second_report)
    until(lambda: place.servers() == [], "the server ends with the last launch")
    until(lambda: not is_alive(server["pid"]), "its process too")


def test_server_outlives_neither_a_killed_launch_nor_its_agent(place: Place) -> None:
    process, report = waiting(place, "killed")
    seen = place.seen(report)
    [server] = place.servers()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    until(lambda: place.servers() == [], "the server ends by itself")
    until(lambda: not is_alive(server["pid"]), "its process too")
    assert not is_alive(seen["pid"])


def test_interrupted_while_the_server_starts(place: Place) -> None:
    process = place.start(*LAUNCH)
    until(lambda: place.servers() != [], "a server starts")
    [server] = place.servers()
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert not place.report.exists()
    until(lambda: place.servers() == [] and not is_alive(server["pid"]), "the server ends")


def check_budgets(place: Place, port: str) -> None:
    """The server runs with what it chose: on the CPU no host memory, and files, as no flag forbade them."""
    told = place.run("launch", "codex", "--cache-host", "300MiB")
    assert told.returncode == 0
    assert "has --cache-host 0.00 GiB (on the CPU " in told.stderr
    assert f"not 0.29 GiB. To change it: ft stop {port}, then launch again" in told.stderr
    refused = place.run("launch", "codex", "--cache-disk", "0")
    assert refused.returncode == 1
    assert "may keep prompts on the disk, --cache-disk 0 forbids it" in refused.stderr
    assert f"Try:   ft stop {port}, then launch again" in refused.stderr


def test_keep_leaves_the_server_and_the_next_launch_finds_it(place: Place) -> None:
    assert place.run(*LAUNCH, "--keep").returncode == 0
    [server] = place.servers()
    key = place.seen()["environment"]["ANTHROPIC_AUTH_TOKEN"]
    assert len(key) > 20
    without_model = place.run("launch", "codex", "--context", "999999")
    assert without_model.returncode == 1
    assert "--context asks for 999,999" in without_model.stderr
    assert place.run("launch", "codex").returncode == 0
    assert place.seen()["environment"]["FT_API_KEY"] == key
    assert [s["pid"] for s in place.servers()] == [server["pid"]]
    planned = place.run("launch", "claude", "--dry-run", "--json")
    check_budgets(place, server["url"].rpartition(":")[2])
    assert server["url"] in planned.stdout
    assert key not in planned.stdout
