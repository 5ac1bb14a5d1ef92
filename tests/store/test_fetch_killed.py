"""Row 1: kill -9 at random moments of a real `ft pull`; Ctrl-C; two at once."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.store.hubs import NAME, a_hub, models, same, start_ft
from tests.store.models import model
from tests.support.hub_server import Hub

__all__ = ["a_hub"]
MOST_LOST = 64 << 20


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_killed_anywhere_the_next_pull_goes_on(a_hub: Hub, ft_home: Path, kills: int) -> None:
    """What the CDN had sent at each kill, less what the next pull finds, is lost: at most 64 MB. No byte is wrong."""
    files = model(*[9 << 20] * 8)
    total = sum(map(len, files.values()))
    a_hub.add(NAME, files)
    a_hub.cdn.rate = 60e6
    chance = random.Random(3)
    lost, had, hits = [], 0, 0
    for _ in range(kills):
        process = start_ft(ft_home, a_hub, "pull", NAME, "--json")
        assert process.stdout is not None
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] in ("plan", "done"):
                break
        if events[-1]["event"] == "done":
            break
        lost.append(had - events[-1]["present"])
        before = a_hub.cdn.sent
        enough = before + chance.uniform(0, 1.6 * total / kills)
        deadline = time.monotonic() + chance.uniform(0.3, 3)  # one that comes before the transfer is a kill too
        while a_hub.cdn.sent < enough and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        time.sleep(0.05)
        had = events[-1]["present"] + a_hub.cdn.sent - before
        hits += had > events[-1]["present"]
        assert models(ft_home) in ([".fetch-org--name"], [], ["org--name"])
    assert max(lost) <= MOST_LOST
    a_hub.cdn.rate = 0
    process = start_ft(ft_home, a_hub, "pull", NAME)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert same(ft_home / "models" / "org--name", files)
    assert models(ft_home) == ["org--name"]
    assert hits > 0, "no kill hit a transfer: the test has lost its point"


def test_killed_in_the_last_steps(a_hub: Hub, ft_home: Path) -> None:
    """What a kill between the renames leaves: the old model is found again, and nothing else stays."""
    from tests.store.hubs import get

    files = model(1000)
    a_hub.add(NAME, files)
    root = get().path.parent
    (root / "org--name").rename(root / ".old-org--name")
    (root / ".partial-org--name").mkdir()
    (root / ".partial-org--name" / "x").write_bytes(b"half")
    assert not get().fetched
    assert same(root / "org--name", files)
    assert models(ft_home) == ["org--name"]


def test_ctrl_c_is_quiet_and_keeps_what_has_arrived(a_hub: Hub, ft_home: Path) -> None:
    files = model(40 << 20)
    a_hub.add(NAME, files)
    a_hub.cdn.rate = 20e6
    process = start_ft(ft_home, a_hub, "pull", NAME, FT_DEBUG="0")
    deadline = time.monotonic() + 60
    while a_hub.cdn.sent < 12 << 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert models(ft_home) == [".fetch-org--name"]
    a_hub.cdn.rate = 0
    process = start_ft(ft_home, a_hub, "pull", NAME)
    _, said = process.communicate(timeout=60)
    assert "of them are here already" in said
    assert same(ft_home / "models" / "org--name", files)


def test_two_pulls_at_once_fetch_once(a_hub: Hub, ft_home: Path) -> None:
    files = model(9 << 20)
    a_hub.add(NAME, files)
    a_hub.cdn.rate = 10e6
    processes = [start_ft(ft_home, a_hub, "pull", NAME) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted(out.split()[0] for out, _ in outputs) == ["Already", "Pulled"]
    assert a_hub.cdn.sent < 11 << 20
