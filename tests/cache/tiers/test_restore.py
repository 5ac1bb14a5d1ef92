"""What was kept comes back, from host memory and from disk: every token and state on the device is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftengine.core import BoundaryKind, CacheLayout
from tests.cache.tiers.device import ATTENTION, HYBRID, Bench, open_bench, packed, prompt, until

LAYOUTS = [pytest.param(HYBRID, id="hybrid"), pytest.param(ATTENTION, id="attention")]


@pytest.fixture(params=["host", "disk", "both"])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(layout: CacheLayout, tier: str, folder: Path, page_size: int = 16) -> Bench:
    host = 0 if tier == "disk" else 64 << 20
    disk = 0 if tier == "host" else 64 << 20
    return open_bench(layout, host, disk, folder, page_size=page_size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 15, 16, 511, 512, 513, 1024, 1500])
def test_comes_back(layout: CacheLayout, length: int, tier: str, tmp_path: Path) -> None:
    bench = opened(layout, tier, tmp_path)
    tokens = prompt(length)
    ticket = bench.keep(tokens)
    assert ticket is not None
    assert not ticket.reason
    found = bench.find([*tokens, 5])
    assert found is not None
    assert found.tokens == length
    assert found.kind == (BoundaryKind.PROMPT_END if layout.states else None)
    ticket = bench.restore(tokens, found)
    assert (ticket.tokens, ticket.reason) == (length, "")
    bench.check_restored(tokens, ticket)
    bench.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [100, 700, 1536])
def test_after_a_restart(layout: CacheLayout, length: int, tmp_path: Path) -> None:
    tokens = prompt(length)
    bench = opened(layout, "both", tmp_path)
    bench.keep(tokens)
    bench.close()
    bench = opened(layout, "both", tmp_path)
    for tier in ("disk", "host"):  # what was read once is in host memory
        found = bench.find(tokens)
        assert found is not None
        assert (found.tokens, found.tier) == (length, tier)
        ticket = bench.restore(tokens, found)
        assert (ticket.tokens, ticket.reason) == (length, "")
        bench.check_restored(tokens, ticket)
    bench.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["interpret", "cuda"])
def test_where_a_gpu_computes(layout: CacheLayout, where: str, tmp_path: Path) -> None:
    """States of all layers in one tensor; on a GPU by its own stream, from memory it reads by itself."""
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    bench = open_bench(layout, 4 << 20, 64 << 20, tmp_path, where=where)
    for length in (100, 1024, 1300):
        tokens = prompt(length, length)
        bench.keep(tokens)
        for start in (0, 96, 528):
            found = bench.find(tokens, above=start)
            if found is not None:
                ticket = bench.restore(tokens, found, start)
                assert (ticket.tokens, ticket.reason) == (length, "")
                bench.check_restored(tokens, ticket)
    bench.close()
    bench = open_bench(layout, 4 << 20, 64 << 20, tmp_path, where=where)
    tokens = prompt(1300, 1300)
    found = bench.find(tokens)
    assert found is not None
    assert found.tier == "disk"
    ticket = bench.restore(tokens, found)
    bench.check_restored(tokens, ticket)
    bench.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 4, 24])
def test_pages_of_any_size(layout: CacheLayout, page_size: int, tmp_path: Path) -> None:
    device_pages = open_bench(layout, 64 << 20, 0, None, page_size=page_size, pages=2048 // page_size + 8)
    tokens = prompt(1300)
    device_pages.keep(tokens)
    found = device_pages.find(tokens)
    assert found is not None
    ticket = device_pages.restore(tokens, found)
    assert ticket.tokens == 1300
    device_pages.check_restored(tokens, ticket)
    device_pages.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [16, 480, 512, 528, 1024])
def test_what_is_in_place_is_not_written(layout: CacheLayout, start: int, tier: str, tmp_path: Path) -> None:
    """A page before `start` that holds something else stays as it is."""
    bench = opened(layout, tier, tmp_path)
    tokens = prompt(1300)
    bench.keep(tokens)
    found = bench.find(tokens, above=start)
    assert found is not None
    first = bench.target(1300)[0]
    ticket = bench.restore(tokens, found, start)
    bench.check_restored(tokens, ticket)
    bench.device.tensors.keys[0][first] = -1.0
    ticket = bench.tiers.restore(found, packed(tokens), start, bench.target(1300), 1)
    until(lambda: ticket.done)
    assert (bench.device.tensors.keys[0][first] == -1.0).all()
    bench.check_restored(tokens, ticket, start)
    bench.close()


def test_any_common_beginning_counts_without_states(tier: str, tmp_path: Path) -> None:
    """The longest one, against a search over all kept paths token by token."""
    import random

    chance = random.Random(1)
    bench = opened(ATTENTION, tier, tmp_path)
    kept: list[list[int]] = []
    for number in range(12):
        base = chance.choice(kept)[: chance.randrange(1, 1400)] if kept and number % 3 else []
        tokens = [*base, *prompt(chance.randrange(1, 900), number)][:1500]
        bench.keep(tokens)
        kept.append(tokens)
    for number in range(60):
        source = chance.choice(kept)
        asked = [*source[: chance.randrange(1, len(source) + 1)], *prompt(30, 100 + number)]
        limit = chance.randrange(1, len(asked) + 1)
        expected = max(common(asked[:limit], tokens) for tokens in kept)
        found = bench.find(asked, limit)
        assert (found.tokens if found is not None else 0) == expected
        if found is not None and number % 4 == 0:
            ticket = bench.restore(asked, found)
            assert ticket.tokens == expected
            bench.check_restored(asked, ticket)
    bench.close()


def test_states_are_found_at_anchors_only(tier: str, tmp_path: Path) -> None:
    bench = opened(HYBRID, tier, tmp_path)
    tokens = prompt(1400)
    places = [3, 300, 511, 512, 700, 1023, 1024, 1400]
    for place in places:
        bench.keep(tokens[:place], BoundaryKind.SYSTEM)
    other = [*tokens[:900], *prompt(500, 9)]
    bench.keep(other, BoundaryKind.SYSTEM)
    for limit in (*places, 2, 4, 299, 1022, 1399):
        for above in (0, 2, 510, 512, 1023):
            expected = max((place for place in places if above < place <= limit), default=None)
            found = bench.find(tokens, limit, above)
            assert (found.tokens if found is not None else None) == expected
    found = bench.find(other[:1399])
    assert found is not None
    assert found.tokens == 700
    ticket = bench.restore(other, found)
    bench.check_restored(other, ticket)
    bench.close()


def common(left: list[int], right: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_a_path_of_numbers_that_are_none_is_forgotten(tier: str, tmp_path: Path) -> None:
    """At once, with all that begins as it does, copies under way too; and it does not come back at the next start."""
    bench = opened(HYBRID, tier, tmp_path)
    tokens, other = prompt(1300), prompt(700, 5)
    for path in (tokens, tokens[:600], [*tokens[:900], *prompt(200, 7)], other):
        bench.keep(path, BoundaryKind.SYSTEM)
    late = bench.keep([*tokens, *prompt(300, 8)], BoundaryKind.SYSTEM, wait=False)
    assert late is not None
    bench.tiers.forget(packed(tokens))
    assert bench.find(tokens) is None
    until(lambda: late.done)
    for path in (tokens, tokens[:600], [*tokens[:900], *prompt(200, 7)], [*tokens, *prompt(300, 8)]):
        assert bench.find(path) is None
    found = bench.find(other)
    assert found is not None
    assert found.tokens == 700
    bench.close()
    if tier != "host":
        bench = opened(HYBRID, tier, tmp_path)
        assert bench.find(tokens) is None
        assert bench.find(other) is not None
        bench.close()
