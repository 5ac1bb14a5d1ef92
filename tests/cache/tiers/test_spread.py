"""Places on disk are close enough to each other that an edit anywhere costs little, and no closer."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from ftengine.cache.captures import SPACING
from ftengine.cache.tiers.writer import Pace
from ftengine.core import BoundaryKind, CacheLayout, StateSpec
from tests.cache.tiers.device import Bench, open_bench, prompt, until
from tests.cache.tiers.test_writing import chunks, tails

LAYOUT = CacheLayout(1, 1, 4, "float32", ((StateSpec("s", (4, 256), "float32"),),))
ANCHOR, TOKEN = 4096, 32
ENDS_LAST = Pace(settle=3600.0, lag=3600.0, retry=0.05, between=0.0)
KINDS = BoundaryKind


def opened(folder: Path, host: int, pace: Pace = ENDS_LAST, disk: int = 64 << 20) -> Bench:
    return open_bench(LAYOUT, host, disk, folder, pace=pace, pages=640)


def grow(bench: Bench, path: list[int], length: int, seed: int = 0, session: str = "s") -> list[int]:
    """An agent's loop: places at most 300 tokens apart, of every kind that comes in one."""
    chance = random.Random(seed)
    kinds = (KINDS.MESSAGE, KINDS.THINKING, KINDS.CALL_START, KINDS.RESULT_START, KINDS.ANSWER_END, KINDS.SPACING)
    while len(path) < length:
        path = [*path, *prompt(chance.randrange(5, 300), seed + len(path))]
        bench.keep(path, chance.choice(kinds) if len(path) < length else KINDS.ANSWER_END, session)
    return path


def widest(folder: Path, end: int) -> int:
    return max(high - low for low, high in pairwise([0, *tails(folder), end]))


@pytest.mark.parametrize("host", [pytest.param(40 * ANCHOR + 9000 * TOKEN, id="short"), pytest.param(0, id="none")])
def test_what_host_memory_gives_up_is_on_disk_or_close_to_what_is(host: int, tmp_path: Path) -> None:
    """A session whose places are many more than fit: whatever it is cut at, less than the spacing is lost."""
    bench = opened(tmp_path, host)
    path = grow(bench, [], 9000)
    until(lambda: widest(tmp_path, len(path)) <= SPACING)
    assert len(tails(tmp_path)) <= 2 * len(path) / SPACING + 1
    written = bench.tiers.sizes()[-1].written
    assert written <= 2 * sum(file.stat().st_size for file in tmp_path.rglob("*-tail-*")) + len(path) * TOKEN * 2
    chance = random.Random(1)
    for cut in (chance.randrange(SPACING, len(path)) for _ in range(40)):
        found = bench.find(path, cut)
        assert found is not None
        assert cut - found.tokens <= SPACING
        ticket = bench.restore(path, found)
        assert ticket.tokens == found.tokens
        bench.check_restored(path, ticket)
    bench.close()
    bench = opened(tmp_path, host)
    assert widest(tmp_path, len(path)) <= SPACING
    found = bench.find(path)
    assert found is not None
    assert found.tokens == len(path)
    bench.close()


def test_branches_are_covered_from_where_they_part(tmp_path: Path) -> None:
    """Places behind which others were enough are too few when the conversation goes on in another way."""
    bench = opened(tmp_path, 8 << 20)
    trunk = grow(bench, [], 2000)
    for number in range(8):
        cut = random.Random(number).randrange(600, 1900)
        branch = grow(bench, trunk[:cut], cut + 1500, seed=100 + number)
        until(lambda: not any(getattr(record, "between", False) for record in list(bench.tiers._books.unwritten)))
        on_it = [place.end for place in _places(bench, branch)]
        assert max(high - low for low, high in pairwise([0, *on_it, len(branch)])) <= SPACING
    bench.close()


def _places(bench: Bench, path: list[int]) -> list:
    """Anchors on disk along a path, by looking for each of them from behind."""
    found, limit = [], len(path)
    while (place := bench.find(path, limit)) is not None:
        record = place.handle.last
        if record.disk:
            found.append(record)
        limit = place.tokens - 1
    return found[::-1]


def test_with_room_in_host_memory_it_waits(tmp_path: Path) -> None:
    bench = opened(tmp_path, 64 << 20, Pace(3600.0, 3600.0, 0.05, between=0.5))
    began = time.monotonic()
    path = grow(bench, [], 3000)
    until(lambda: chunks(tmp_path) == len(path) // 512)
    early = tails(tmp_path)
    assert time.monotonic() - began > 0.4 or not early
    until(lambda: widest(tmp_path, len(path)) <= SPACING)
    assert time.monotonic() - began >= 0.5
    bench.close(0.0)


def test_side_requests_leave_no_trail(tmp_path: Path) -> None:
    bench = opened(tmp_path, 64 << 20)
    path: list[int] = []
    while len(path) < 3000:
        path = [*path, *prompt(200, len(path))]
        bench.keep(path, KINDS.MESSAGE, side=True)
    bench.keep(path[:1100], KINDS.PROMPT_END)  # the main conversation shares its beginning
    bench.keep([*path[:1100], *prompt(300, 7)], KINDS.ANSWER_END)
    bench.close()
    assert tails(tmp_path) == [1100, 1400]


def test_a_full_disk_gives_a_live_conversation_the_room_of_one_that_is_over(tmp_path: Path) -> None:
    budget = 800_000  # one conversation with its places, and not two
    bench = opened(tmp_path, 8 << 20, disk=budget)
    over = grow(bench, [], 9000)
    bench.close()
    assert widest(tmp_path, len(over)) <= SPACING
    bench = opened(tmp_path, 8 << 20, disk=budget)
    live = grow(bench, prompt(50, 900), 9000, session="t")
    until(lambda: not any(getattr(record, "between", False) for record in list(bench.tiers._books.unwritten)))
    on_disk = [place.end for place in _places(bench, live)]
    assert max(high - low for low, high in pairwise([0, *on_disk, len(live)])) <= SPACING
    assert bench.tiers.sizes()[1].used <= budget
    assert bench.tiers.sizes()[1].evictions > 15
    bench.tiers.check_integrity()
    bench.close()


def test_where_the_next_question_departs_is_written_at_once(tmp_path: Path) -> None:
    bench = opened(tmp_path, 64 << 20, Pace(3600.0, 3600.0, 0.05, between=3600.0))
    bench.keep(prompt(300), KINDS.QUESTION_END)
    bench.keep(prompt(310), KINDS.PROMPT_END)
    bench.keep(prompt(400), KINDS.ANSWER_END)
    until(lambda: 300 in tails(tmp_path))
    bench.close(0.0)


def test_what_is_read_from_host_memory_counts() -> None:
    bench = open_bench(LAYOUT)
    bench.keep(prompt(700))
    found = bench.find(prompt(700))
    assert found is not None
    bench.restore(prompt(700), found)
    assert bench.tiers.sizes()[0].read == found.bytes == ANCHOR + 700 * TOKEN
    bench.close()
