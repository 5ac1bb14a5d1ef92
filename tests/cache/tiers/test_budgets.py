"""Budgets over thousands of random keeps and restores, and which records go when room is short."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from ftengine.cache.tiers.base import CHUNK_TOKENS
from ftengine.core import BoundaryKind, CacheLayout, StateSpec
from tests.cache.tiers.device import IDENTITY, Bench, open_bench, packed, prompt, until

STATE = ((StateSpec("s", (4, 256), "float32"),),)  # 4 KiB; a chunk: 16 KiB
HYBRID = CacheLayout(1, 1, 4, "float32", STATE)
ATTENTION = CacheLayout(1, 1, 4, "float32")
CHUNK = CHUNK_TOKENS * 32
ANCHOR = 4096
REQUESTS = 170  # of each of six kinds: 1,000 keeps and as many restores


def check_budgets(bench: Bench, folder: Path | None) -> None:
    """The books' own figures, and what really lies there."""
    bench.tiers.check_integrity()
    for size in bench.tiers.sizes():
        assert 0 <= size.used <= size.budget
    if folder is not None:
        real = 0
        for path in (folder / IDENTITY.key).iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is being written and renamed
                real += path.stat().st_size
        assert real <= bench.tiers.sizes()[-1].budget


@pytest.mark.parametrize("layout", [pytest.param(HYBRID, id="hybrid"), pytest.param(ATTENTION, id="attention")])
@pytest.mark.parametrize("tiers", ["host", "disk", "both"])
def test_two_thousand_random_requests(layout: CacheLayout, tiers: str, quick_path: Path) -> None:
    chance = random.Random(3)
    host, disk = (0 if tiers == "disk" else 400_000), (0 if tiers == "host" else 700_000)
    folder = quick_path if disk else None
    bench = open_bench(layout, host, disk, folder, pages=128)
    paths: list[list[int]] = []
    restored = 0
    for number in range(REQUESTS):
        base = chance.choice(paths[-20:])[: chance.randrange(1, 1200)] if paths and chance.random() < 0.7 else []
        tokens = [*base, *prompt(chance.randrange(1, 400), number)][:1400]
        paths.append(tokens)
        kind = chance.choice([BoundaryKind.SYSTEM, BoundaryKind.PROMPT_END, BoundaryKind.SPACING])
        bench.keep(tokens, kind, session=str(chance.randrange(6)), side=chance.random() < 0.2)
        asked = chance.choice(paths[-30:])
        found = bench.find(asked, chance.choice([len(asked), chance.randrange(1, len(asked) + 1)]))
        if found is not None:
            ticket = bench.restore(asked, found)
            if ticket.tokens:
                bench.check_restored(asked, ticket)
                restored += 1
        if number % 20 == 0:
            check_budgets(bench, folder)
    check_budgets(bench, folder)
    assert restored > REQUESTS // 10
    assert sum(size.evictions for size in bench.tiers.sizes()) > 20
    bench.close()
    assert bench.tiers._books.arena.used == sum(
        block.extent
        for record in bench.tiers._books.index.by_key.values()
        if record.host is not None
        for block in record.host.blocks()
    ), "host memory is leaked"
    assert all(record.holds == 0 for record in bench.tiers._books.index.by_key.values())


def test_chunks_go_after_all_that_hangs_on_them() -> None:
    """A long path's anchors make way for another session's; its chunks stay while one anchor needs them."""
    bench = open_bench(HYBRID, 3 * CHUNK + 6 * (ANCHOR + 512 * 32), 0, None)
    first = prompt(1100)
    for place in (1030, 1060, 1100):
        bench.keep(first[:place], BoundaryKind.SPACING, session="a")
    for number in range(30):
        tokens = prompt(520 + number, 50)
        bench.keep(tokens, BoundaryKind.PROMPT_END, session="b")
        bench.tiers.check_integrity()
        found = bench.find(first)
        if found is None:
            break
        ticket = bench.restore(first, found)
        assert ticket.tokens == found.tokens
        bench.check_restored(first, ticket)
    assert bench.find(prompt(549, 50)) is not None
    bench.close()


def test_a_side_request_takes_nothing_from_a_live_session() -> None:
    bench = open_bench(HYBRID, 2 * CHUNK + 2 * ANCHOR + 400 * 32, 0, None)
    main = prompt(1030)
    bench.keep(main, session="main")
    ticket = bench.keep(prompt(900, 1), session="main", side=True)
    assert ticket is not None
    assert ticket.reason
    found = bench.find(main)
    assert found is not None
    assert found.tokens == 1030
    assert bench.find(prompt(900, 1)) is None
    bench.close()


def test_two_sessions_taking_turns_keep_their_tails() -> None:
    """Older turns' ends go before either session's last one."""
    bench = open_bench(HYBRID, 4 * CHUNK + 5 * (ANCHOR + 60 * 32), 0, None)
    paths = {name: prompt(1024 + 10, seed) for seed, name in enumerate("ab")}
    for number in range(8):
        for name in "ab":
            paths[name] = [*paths[name], *prompt(3, 10 + number)]
            bench.keep(paths[name], BoundaryKind.PROMPT_END, session=name)
    for name in "ab":
        found = bench.find(paths[name])
        assert found is not None
        assert found.tokens == len(paths[name])
    assert bench.tiers.sizes()[0].evictions > 3
    bench.close()


def test_the_end_of_tools_and_system_text_stays() -> None:
    bench = open_bench(HYBRID, 3 * CHUNK + 4 * (ANCHOR + 300 * 32), 0, None)
    system = prompt(1034)
    bench.keep(system, BoundaryKind.SYSTEM)
    path = system
    for number in range(12):
        path = [*path, *prompt(20, number + 1)]
        bench.keep(path, BoundaryKind.MESSAGE)
    found = bench.find(system)
    assert found is not None
    assert (found.tokens, found.kind) == (1034, BoundaryKind.SYSTEM)
    bench.close()


def test_what_is_larger_than_the_tier_is_left_out() -> None:
    bench = open_bench(HYBRID, CHUNK + 2 * ANCHOR, 0, None)
    ticket = bench.keep(prompt(1300))
    assert ticket is not None
    assert ticket.reason
    bench.keep(prompt(100, 1))
    assert bench.find(prompt(100, 1)) is not None
    bench.close()


def test_a_path_longer_than_host_memory_goes_through_it_to_disk(tmp_path: Path) -> None:
    bench = open_bench(HYBRID, 2 * CHUNK + 2 * ANCHOR, 1 << 20, tmp_path)
    tokens = prompt(2000)
    ticket = bench.keep(tokens)
    assert ticket is not None
    assert not ticket.reason
    found = bench.find(tokens)
    assert found is not None
    assert (found.tokens, found.tier) == (2000, "disk")
    ticket = bench.restore(tokens, found)
    assert ticket.tokens == 2000
    bench.check_restored(tokens, ticket)
    check_budgets(bench, tmp_path)
    bench.close()


def test_the_oldest_other_models_go_first(tmp_path: Path) -> None:
    """One budget over the folder: another identity's records make way before this one's own."""
    import msgspec

    others = [msgspec.structs.replace(IDENTITY, weights=str(number)) for number in range(3)]
    for other in others:
        bench = open_bench(HYBRID, 1 << 20, 100_000, tmp_path, other)
        bench.keep(prompt(600), BoundaryKind.SYSTEM)
        bench.close()
    mine = [prompt(600, number) for number in range(1, 3)]
    bench = open_bench(HYBRID, 1 << 20, 100_000, tmp_path)
    for tokens in mine:
        bench.keep(tokens, BoundaryKind.SYSTEM)
        bench.written()
    left = [sum(path.stat().st_size for path in (tmp_path / other.key).glob("*")) for other in others]
    total = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.name != "lock" and path.is_file())
    assert total <= 100_000
    assert left[0] < left[2]
    assert left[2] > CHUNK
    for tokens in mine:
        assert bench.find(tokens) is not None
    bench.close()


def test_keeping_waits_for_nobody(tmp_path: Path) -> None:
    """A path of 60,000 tokens: keep returns at once, find in a millisecond."""
    import time

    bench = open_bench(HYBRID, 8 << 20, 8 << 20, tmp_path, pages=3800)
    tokens = prompt(60_000)
    bench.keep(tokens)
    path = packed(tokens)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        found = bench.tiers.find(path, 60_000, 0)
        times.append(time.perf_counter() - began)
        assert found is not None
    assert min(times) < 1e-3
    times = []
    for _ in range(20):
        began = time.perf_counter()
        ticket = bench.keep(tokens, wait=False)
        times.append(time.perf_counter() - began)
        assert ticket is not None
        until(lambda ticket=ticket: ticket.done)
    bench.close()


def test_a_smaller_budget_at_the_next_start(tmp_path: Path) -> None:
    """What is too much goes at once, what is worth least first."""
    bench = open_bench(HYBRID, 1 << 20, 1 << 20, tmp_path)
    for number in range(12):
        bench.keep(prompt(600, number), BoundaryKind.SYSTEM if number == 0 else BoundaryKind.PROMPT_END)
    bench.close()
    bench = open_bench(HYBRID, 1 << 20, 120_000, tmp_path)
    check_budgets(bench, tmp_path)
    assert bench.find(prompt(600, 0)) is not None
    assert bench.tiers.sizes()[1].anchors >= 3
    bench.close()
