"""What is written to the disk, when, and what never is; two servers in one folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftengine.cache.tiers.writer import Pace
from ftengine.core import BoundaryKind
from tests.cache.tiers.device import ATTENTION, HYBRID, IDENTITY, Bench, open_bench, packed, prompt, until

SLOW = Pace(settle=3600.0, lag=3600.0, retry=0.05, between=3600.0)
KINDS = BoundaryKind


def opened(folder: Path, pace: Pace = SLOW, host: int = 64 << 20) -> Bench:
    return open_bench(HYBRID, host, 64 << 20, folder, pace=pace)


def tails(folder: Path) -> list[int]:
    """Positions of the anchors on disk."""
    return sorted(int(path.name[:8], 16) for path in (folder / IDENTITY.key).glob("0*-tail-*"))


def chunks(folder: Path) -> int:
    return len(list((folder / IDENTITY.key).glob("0*-chunk-*")))


def session(bench: Bench, turns: int, name: str = "s", seed: int = 0) -> list[int]:
    """Tools and system text, a user's message, then loop steps: as an agent's requests come."""
    path = prompt(600, seed)
    bench.keep(path, KINDS.SYSTEM, name)
    path = [*path, *prompt(100, seed + 1)]
    bench.keep(path[:650], KINDS.LAST_USER, name)
    for turn in range(turns):
        bench.keep(path, KINDS.PROMPT_END, name)
        path = [*path, *prompt(40, seed + 2 + turn)]
        bench.keep(path[:-20], KINDS.THINKING, name)
        bench.keep(path, KINDS.ANSWER_END, name)
        path = [*path, *prompt(60, seed + 50 + turn)]
    return path[:-60]


def test_a_session_of_many_turns_costs_few_writes(tmp_path: Path) -> None:
    """At once: what later sessions start from. The last end: when the session rests, or at the end. Then also the one
    place without which more than 512 tokens would lie between two."""
    bench = opened(tmp_path)
    path = session(bench, 8)
    until(lambda: len(tails(tmp_path)) == 3 and all(each.length < 512 for each in list(bench.tiers._books.unwritten)))
    time.sleep(0.05)
    assert tails(tmp_path) == [600, 650, 700]
    assert chunks(tmp_path) == len(path) // 512
    disk = bench.tiers.sizes()[1]
    assert disk.details["superseded"] >= 8 * 3 - 3
    bench.close()
    assert tails(tmp_path) == [600, 650, 700, 1200, len(path)]
    bench = opened(tmp_path)
    found = bench.find([*path, 1, 2, 3])
    assert found is not None
    assert (found.tokens, found.kind) == (len(path), KINDS.ANSWER_END)
    ticket = bench.restore(path, found)
    bench.check_restored(path, ticket)
    bench.close()


def test_a_session_that_rests_is_written(tmp_path: Path) -> None:
    bench = opened(tmp_path, Pace(settle=1.5, lag=3600.0, retry=0.05))
    path = session(bench, 3)
    until(lambda: len(path) in tails(tmp_path))
    assert tails(tmp_path) == [600, 650, 700, len(path)]
    bench.close()


def test_a_session_that_never_rests_is_written_now_and_then(tmp_path: Path) -> None:
    bench = opened(tmp_path, Pace(settle=3600.0, lag=0.3, retry=0.05))
    began, turns = time.monotonic(), 0
    path = prompt(100)
    bench.keep(path, KINDS.PROMPT_END)
    while turns <= 20 or len(tails(tmp_path)) < 3:
        path = [*path, *prompt(2, turns)]
        bench.keep(path, KINDS.ANSWER_END)
        turns += 1
        time.sleep(0.01)
        assert time.monotonic() - began < 60
    bench.written()
    bench.close(0.0)
    assert len(tails(tmp_path)) <= 4 + (time.monotonic() - began) / 0.3


def test_sessions_do_not_supersede_each_other(tmp_path: Path) -> None:
    bench = opened(tmp_path)
    base = prompt(700)
    bench.keep(base[:500], KINDS.PROMPT_END, "a")  # a's first: written
    bench.keep(base[:550], KINDS.ANSWER_END, "a")
    bench.keep(base[:600], KINDS.ANSWER_END, "b")
    bench.keep([*base[:520], *prompt(100, 5)], KINDS.ANSWER_END, "a")  # another branch
    bench.close()
    assert tails(tmp_path) == [500, 550, 600, 620]


def test_side_requests_are_not_written(tmp_path: Path) -> None:
    """But a sub-agent's tools and system text, which the next sub-agent has, too."""
    bench = opened(tmp_path, Pace(0.0, 0.0, 0.05))
    bench.keep(prompt(700, 1), KINDS.PROMPT_END, "s", side=True)
    bench.keep(prompt(300, 2), KINDS.SYSTEM, "s", side=True)
    bench.keep(prompt(340, 2), KINDS.PROMPT_END, "s", side=True)
    assert bench.find(prompt(700, 1)) is not None
    bench.close()
    assert tails(tmp_path) == [300]
    assert chunks(tmp_path) == 0


def test_without_states_a_longer_tail_replaces_shorter_ones(tmp_path: Path) -> None:
    bench = open_bench(ATTENTION, 64 << 20, 64 << 20, tmp_path)
    path = prompt(1100)
    for place in range(520, 1100, 20):
        bench.keep(path[:place])
    bench.close()
    assert tails(tmp_path) == [1080]
    assert chunks(tmp_path) == 2
    assert bench.tiers.sizes()[0].anchors == 1


@pytest.mark.parametrize("host", [64 << 20, 0])
def test_end_in_bounded_time(host: int, tmp_path: Path) -> None:
    """What was not due is written at the end; with no time for it, nothing is, and nothing is broken."""
    bench = opened(tmp_path / "a", host=host)
    path = session(bench, 3)
    began = time.monotonic()
    bench.close(60.0)
    assert time.monotonic() - began < 30.0
    assert len(path) in tails(tmp_path / "a")
    bench = opened(tmp_path / "b", host=host)
    session(bench, 3)
    bench.close(0.0)
    assert bench.tiers.keep is not None
    assert bench.find(path) is None
    bench = opened(tmp_path / "b", host=host)
    assert bench.tiers.sizes()[-1].failures == 0
    bench.close()


def test_two_servers_share_a_folder(quick_path: Path) -> None:
    """Each finds what the other wrote as soon as it writes something itself, and the budget holds over both."""
    budget = 400_000
    benches = [open_bench(HYBRID, 8 << 20, budget, quick_path) for _ in range(2)]
    for number in range(60):
        bench, other = benches[number % 2], benches[(number + 1) % 2]
        bench.keep(prompt(700, number), KINDS.SYSTEM, session=str(number))
        if number < 6:  # before the budget is reached
            bench.written()
            other.keep(prompt(100, 1000 + number), KINDS.SYSTEM)
            other.written()
            found = other.find(prompt(700, number))
            assert found is not None
            assert found.tier == "disk"
            ticket = other.restore(prompt(700, number), found)
            assert ticket.tokens == 700
            other.check_restored(prompt(700, number), ticket)
    for bench in benches:
        bench.written()
    assert sum(path.stat().st_size for path in (quick_path / IDENTITY.key).iterdir()) <= budget
    assert sum(bench.tiers.sizes()[1].evictions for bench in benches) > 10
    for bench in benches:
        bench.close()


def test_a_restore_goes_before_what_is_being_kept(tmp_path: Path) -> None:
    """Keeps that were asked for first are still under way when a restore asked for last is done."""
    bench = opened(tmp_path)
    bench.keep(prompt(600))
    found = bench.find(prompt(600))
    assert found is not None
    paths = [prompt(6000, number) for number in range(1, 6)]
    tickets = [bench.keep(path, wait=False) for path in paths]
    ticket = bench.tiers.restore(found, packed(prompt(600)), 0, [500] * 38, 3)
    until(lambda: ticket.done)
    assert not all(kept.done for kept in tickets if kept is not None)
    until(lambda: all(kept.done for kept in tickets if kept is not None))
    bench.close()
