"""Pages, states and tails of sequences without a model; `compute` fails when one of them is not its tokens' own."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from ftengine.cache.node import Anchor
from ftengine.cache.place import packed
from ftengine.cache.policy import ValuePolicy
from ftengine.cache.sequences import SequenceCache
from ftengine.cache.sessions import Sessions
from ftengine.core import BoundaryKind
from tests.cache.fake_tiers import FakeTiers
from tests.cache.plain import PAGE, compute, decode, make_cache, make_sequence, ran


def positions(cache: SequenceCache) -> list[int]:
    return sorted(anchor.position for anchor in cache.tree.anchors)


def test_pages_are_taken_for_the_whole_prompt_and_given_back() -> None:
    cache = make_cache(recurrent=False)
    sequence = make_sequence(list(range(10)))
    assert cache.admit(sequence)
    assert len(sequence.pages) == 3
    compute(cache, sequence, 10)
    cache.check_integrity([sequence])
    cache.release(sequence)
    cache.check_integrity([])
    assert (cache.pages.used_count, cache.tree.size, cache.available) == (2, 2, 16)


def test_admission_that_does_not_fit_changes_nothing() -> None:
    cache = make_cache(pages=4, recurrent=False)
    first = make_sequence(list(range(8)))
    assert cache.admit(first)
    compute(cache, first, 8)
    second = make_sequence([*range(8), 50, 51, 52])
    assert not cache.admit(second, headroom=2)
    assert second.pages == []
    cache.check_integrity([first])
    assert cache.admit(second, headroom=1)
    assert second.pages[:2] == first.pages
    assert second.computed == 8
    cache.check_integrity([first, second])


def test_two_that_compute_the_same_share_it_from_then_on() -> None:
    cache = make_cache(recurrent=False)
    sequences = [make_sequence(list(range(9))) for _ in range(2)]
    for sequence in sequences:
        assert cache.admit(sequence)
    assert not set(sequences[0].pages) & set(sequences[1].pages)
    for sequence in sequences:
        compute(cache, sequence, 9)
    assert sequences[0].pages[:2] == sequences[1].pages[:2]
    assert sequences[0].pages[2] != sequences[1].pages[2]
    assert cache.pages.used_count == 4
    cache.check_integrity(sequences)


def test_reserve_forgets_cached_prefixes_but_nothing_that_runs() -> None:
    cache = make_cache(pages=4, recurrent=False)
    ran(cache, list(range(8)))
    new = make_sequence([90, 91])
    assert cache.admit(new)
    assert cache.reserve(new, 16)
    assert cache.tree.size == 0
    assert not cache.reserve(new, 17)
    cache.check_integrity([new])


def test_without_a_state_any_common_beginning_counts_to_the_token() -> None:
    """Against the length of the longest common prefix, at every place of a path and beside its branches."""
    for cut in range(1, 23):
        cache = make_cache(pages=40, recurrent=False)
        ran(cache, list(range(22)))
        ran(cache, [*range(9), 70, 71, 72, 73, 74])
        assert ran(cache, [*range(cut), 50, 51]) == cut
        assert ran(cache, list(range(cut))) == cut - 1
    cache = make_cache(pages=40, slots=0, recurrent=False)
    ran(cache, list(range(22)))
    assert ran(cache, [*range(22), 50]) == 20  # there was no companion for the last two


def test_states_are_kept_where_asked_and_restored_exactly_there() -> None:
    """`compute` asserts that what was restored is of the computed tokens."""
    cache = make_cache(pages=64, slots=12, spacing=8)
    first = make_sequence(
        list(range(30)), {5: BoundaryKind.SYSTEM, 14: BoundaryKind.MESSAGE, 30: BoundaryKind.PROMPT_END}
    )
    assert cache.admit(first)
    for count in (12, 12, 6):
        compute(cache, first, count)
    assert positions(cache) == [5, 12, 14, 20, 28, 29]
    decode(cache, first, list(range(100, 111)))
    cache.release(first)
    cache.check_integrity([])
    assert positions(cache) == [5, 12, 14, 20, 28, 29, 37, 41]
    for tokens, expected in [
        (first.tokens, 37),
        ([*first.tokens, 7], 41),
        (first.tokens[:30], 29),
        (first.tokens[:29], 28),
        ([*first.tokens[:29], 7], 29),
        ([*first.tokens[:27], 7, 7], 20),
        (first.tokens[:14], 12),
        ([*first.tokens[:14], 7], 14),
        ([*first.tokens[:6], 7, 7], 5),
        (first.tokens[:5], 0),
    ]:
        again = make_sequence(tokens)
        assert cache.admit(again)
        assert again.computed == expected
        compute(cache, again, len(tokens) - expected)
        cache.release(again)
        cache.check_integrity([])


def test_no_gap_is_larger_than_the_spacing() -> None:
    cache = make_cache(pages=64, slots=30, spacing=8)
    sequence = make_sequence(list(range(150)), {33: BoundaryKind.MESSAGE, 61: BoundaryKind.RESULT_END})
    assert cache.admit(sequence)
    for count in (20, 44, 1, 35, 50):
        compute(cache, sequence, count)
    found = [0, *positions(cache)]
    assert {33, 61, 149} <= set(found)
    assert max(high - low for low, high in pairwise(found)) <= 8


def test_after_boundary_tokens_a_state_is_kept_while_decoding() -> None:
    cache = make_cache(pages=64, slots=12, spacing=100)
    sequence = make_sequence(list(range(6)), boundary_tokens=(90,))
    assert cache.admit(sequence)
    compute(cache, sequence, 6)
    decode(cache, sequence, [50, 51])
    assert not cache.keeps_next(sequence)
    sequence.tokens.append(90)
    assert cache.keeps_next(sequence)
    sequence.tokens.pop()
    decode(cache, sequence, [90, 52, 53])
    assert positions(cache) == [5, 9]
    cache.release(sequence)
    assert ran(cache, [*range(6), 50, 51, 90, 60]) == 9


def test_the_same_prompt_again_computes_one_token() -> None:
    for length in range(1, 12):
        for recurrent in (False, True):
            cache = make_cache(recurrent=recurrent)
            assert ran(cache, list(range(length))) == 0
            assert ran(cache, list(range(length))) == length - 1


def test_a_cancelled_prompt_goes_on_where_it_stopped() -> None:
    for done in (3, 8, 10):
        for recurrent in (False, True):
            cache = make_cache(recurrent=recurrent)
            gone = make_sequence(list(range(20)))
            assert cache.admit(gone)
            compute(cache, gone, done)
            cache.release(gone)
            assert ran(cache, list(range(20))) == done


def test_a_step_that_fails_gives_back_what_it_was_to_keep() -> None:
    cache = make_cache(spacing=4)
    sequence = make_sequence(list(range(20)))
    assert cache.admit(sequence)
    compute(cache, sequence, 4)
    before = positions(cache)
    _, planned = cache.plan(sequence, 20)
    assert len(planned) > 3
    cache.check_integrity([sequence])
    for each in planned:
        cache.tensors.states[0]["s"][each.slot] = torch.nan
    cache.release(sequence, halfway=True)
    cache.check_integrity([])
    assert positions(cache) == before == [4]
    assert ran(cache, list(range(20))) == 4


@pytest.mark.parametrize("slots", [2, 3])
def test_anchors_give_way_to_running_sequences(slots: int) -> None:
    cache = make_cache(slots=slots)
    running = []
    for index in range(slots):
        sequence = make_sequence([index * 10 + offset for offset in range(9)])
        assert cache.admit(sequence)
        compute(cache, sequence, 9)
        running.append(sequence)
        cache.check_integrity(running)
    assert cache.tree.anchors == set()
    assert not cache.admit(make_sequence([99, 98]))
    for sequence in running:
        cache.release(sequence)
    cache.check_integrity([])


def test_an_anchor_given_up_for_the_sequence_that_starts_from_it_is_still_its_start() -> None:
    """The only slot is handed from the anchor to its user, and what it was kept in must not be lost."""

    class NewestFirst(ValuePolicy):
        def anchor_rank(self, anchor: Anchor) -> tuple[int, float]:
            return (0, -anchor.worth.last_used)

    for slots in (1, 2):
        policy = NewestFirst(Sessions(), PAGE, 1, recurrent=True)
        cache = make_cache(slots=slots, policy=policy)
        for start in (0, 50)[2 - slots :]:
            first = make_sequence(list(range(start, start + 9)))
            assert cache.admit(first)
            compute(cache, first, 6)
            cache.release(first)  # cancelled: its slot becomes the anchor
        assert len(cache.tree.anchors) == slots
        again = make_sequence(list(range(50, 59)))
        assert cache.admit(again)
        assert again.computed == 6
        compute(cache, again, 3)
        cache.check_integrity([again])


def test_pages_below_the_last_anchor_are_not_kept() -> None:
    """They could never be used: no state leads to them."""
    cache = make_cache(slots=4)
    sequence = make_sequence(list(range(40)))
    assert cache.admit(sequence)
    compute(cache, sequence, 16)
    compute(cache, sequence, 6)
    cache.release(sequence, halfway=True)
    cache.check_integrity([])
    assert (cache.tree.size, positions(cache)) == (4, [8, 16])


def test_only_what_makes_way_counts_as_evicted() -> None:
    """Not what is forgotten on purpose, nor what no state leads to; nor what warming up left, when that is over."""
    cache = make_cache(pages=6, recurrent=False)
    ran(cache, list(range(8)))
    ran(cache, list(range(50, 58)))
    assert cache.page_evictions == 0
    ran(cache, list(range(90, 106)))  # four pages, of which two are free
    assert cache.page_evictions == 2
    untrusted = make_sequence(list(range(90, 100)))
    assert cache.admit(untrusted)  # which takes another one, for its last tokens
    assert (cache.tree.size, cache.page_evictions) == (5, 3)
    cache.release(untrusted, keep=False)
    assert (cache.tree.size, cache.page_evictions) == (2, 3)
    cache.clear()
    assert (cache.tree.size, cache.page_evictions) == (0, 0)

    cache = make_cache(slots=1)
    sequence = make_sequence(list(range(40)))
    assert cache.admit(sequence)
    compute(cache, sequence, 16)
    cache.release(sequence, halfway=True)
    assert (cache.tree.size, cache.page_evictions, cache.anchor_evictions) == (0, 0, 0)
    ran(cache, list(range(8)))
    assert (cache.tree.size, len(cache.tree.anchors)) == (2, 1)
    assert cache.admit(make_sequence([60, 61]))
    assert (cache.tree.size, cache.page_evictions, cache.anchor_evictions) == (0, 2, 1)


def test_what_has_little_worth_makes_way_for_what_has_more() -> None:
    """Two live sessions with side requests between them, on few slots: their ends and system texts stay."""
    cache = make_cache(pages=200, slots=8, spacing=8)
    system = list(range(200, 212))
    for turn in range(6):
        for session in ("a", "b"):
            text = system + [ord(session)] * 8 + list(range(10 * turn))
            marks = {12: BoundaryKind.SYSTEM}
            found = ran(cache, [*text, 5], marks, session=session)
            if turn:
                assert found >= len(text) - 10
            ran(cache, list(range(300 + turn, 340 + turn)), session=session, side=True)
    assert ran(cache, [*system, 1], session="c") == 12


def test_untrusted_pages_are_forgotten_with_all_that_grew_on_them() -> None:
    cache = make_cache(pages=30, recurrent=False)
    bystander = make_sequence([*range(8), 70, 71])
    assert cache.admit(bystander)
    compute(cache, bystander, 10)
    for ending in (30, 40):
        other = make_sequence([*range(12), ending, ending, ending, ending, ending])
        assert cache.admit(other)
        compute(cache, other, 17 - other.computed)
        cache.release(other)
    bad = make_sequence([*range(12), 50, 51, 52, 53])
    assert cache.admit(bad)
    compute(cache, bad, 4)
    doubtful = (cache.pages.in_use() | set(bad.pages)) - set(bystander.pages)
    assert len(doubtful) == 4  # one common page, one of each other ending, one of the last
    cache.tensors.keys[0].fill_(torch.nan)
    cache.release(bad, keep=False)
    cache.check_integrity([bystander])
    assert cache.pages.in_use() == set(bystander.pages)
    assert not cache.tensors.keys[0][sorted(doubtful)].isnan().any()
    assert cache.tensors.keys[0][bystander.pages].isnan().all()


def test_untrusted_states_are_forgotten_and_erased_with_their_companions() -> None:
    cache = make_cache(pages=30, spacing=4)
    ran(cache, list(range(3)))
    ran(cache, list(range(14)))
    bad = make_sequence([*range(14), 50, 51])
    assert cache.admit(bad)
    cache.plan(bad, 16)
    cache.tensors.states[0]["s"].fill_(torch.nan)
    cache.tensors.keys[0].fill_(torch.nan)
    used = sorted(cache.slots.in_use())
    assert len(used) > 4
    cache.release(bad, keep=False)
    cache.check_integrity([])
    assert cache.pages.used_count == cache.slots.used_count == 0
    assert not cache.tensors.states[0]["s"][used].isnan().any()
    assert not cache.tensors.keys[0][[30 + slot for slot in used]].isnan().any()


def test_untrusted_pages_that_a_copy_reads_are_not_found_and_go_when_it_is_done() -> None:
    for recurrent in (False, True):
        cache = make_cache(pages=30, recurrent=recurrent)
        ran(cache, list(range(14)))
        tiers = cache.tiers = FakeTiers(cache.tensors)
        ran(cache, [*range(14), 50, 51, 52, 53])
        assert cache.copying
        bad = make_sequence([*range(14), 50, 51, 52, 53, 54, 55])
        assert cache.admit(bad)
        assert bad.computed >= 14
        tiers.forget = lambda tokens: None
        cache.release(bad, keep=False)
        cache.check_integrity([])
        cache.check_idle()
        assert cache.pages.used_count > 0
        again = make_sequence([*range(14), 50, 51, 52])
        assert cache.admit(again)
        assert again.computed == 0
        compute(cache, again, 17)
        cache.check_integrity([again])
        cache.release(again)
        tiers.records.clear()
        tiers.pump(100)
        assert cache.tick() == []
        cache.check_integrity([])
        cache.check_idle()
        assert not cache.copying
        assert ran(cache, [*range(14), 50, 51, 52, 53, 54]) == 17


def test_what_copies_read_does_not_make_way() -> None:
    cache = make_cache(pages=8, slots=3, spacing=100)
    tiers = cache.tiers = FakeTiers(cache.tensors)
    first = make_sequence(list(range(22)))
    assert cache.admit(first)
    compute(cache, first, 22)
    cache.release(first)
    assert len(cache.tree.anchors) == 2
    assert cache.copying == 2
    assert not cache.admit(make_sequence(list(range(50, 70))))
    kept = {anchor.position for anchor in cache.tree.anchors}
    tiers.pump(10)
    cache.tick()
    assert {anchor.position for anchor in cache.tree.anchors} == kept == {21, 22}
    assert all(anchor.below for anchor in cache.tree.anchors)
    assert ran(cache, list(range(50, 70))) == 0


BREAKS = {
    "a page is leaked": lambda cache, sequence: cache.pages.allocate(),
    "a page has two owners": lambda cache, sequence: sequence.pages.append(sequence.pages[-1]),
    "a reference is leaked": lambda cache, sequence: cache.tree.acquire(cache.tree.nodes()[0]),
    "a state slot is leaked": lambda cache, sequence: cache.slots.allocate(),
    "an anchor is lost": lambda cache, sequence: cache.tree.anchors.clear(),
    "an anchor is held by nobody": lambda cache, sequence: setattr(next(iter(cache.tree.anchors)), "holds", 1),
    "not where it says": lambda cache, sequence: setattr(next(iter(cache.tree.anchors)).worth, "position", 3),
    "not its path's": lambda cache, sequence: sequence.pages.reverse(),
    "wrongly in use": lambda cache, sequence: setattr(cache.tree.nodes()[-1], "active", 5),
    "a leaf is lost": lambda cache, sequence: cache.tree.leaves().add(cache.tree.nodes()[-1]),
}


@pytest.mark.parametrize("says", BREAKS)
def test_the_integrity_check_finds_what_it_is_for(says: str) -> None:
    cache = make_cache(slots=6)
    sequence = make_sequence(list(range(13)))
    assert cache.admit(sequence)
    compute(cache, sequence, 13)
    cache.check_integrity([sequence])
    BREAKS[says](cache, sequence)
    with pytest.raises(AssertionError, match=says):
        cache.check_integrity([sequence])


def test_the_integrity_check_wants_every_running_sequence() -> None:
    cache = make_cache()
    sequence = make_sequence([1, 2, 3])
    assert cache.admit(sequence)
    with pytest.raises(AssertionError, match="does not run"):
        cache.check_integrity([])


@pytest.mark.parametrize(
    "says", ["a page is leaked", "a reference is leaked", "a state slot is leaked", "an anchor is held by nobody"]
)
def test_the_idle_check_finds_leaks(says: str) -> None:
    cache = make_cache(slots=6)
    sequence = make_sequence(list(range(13)))
    assert cache.admit(sequence)
    compute(cache, sequence, 13)
    with pytest.raises(AssertionError, match="does not run"):
        cache.check_idle()
    cache.release(sequence)
    cache.check_idle()
    BREAKS[says](cache, sequence)
    with pytest.raises(AssertionError, match=says):
        cache.check_idle()


def test_the_idle_check_does_not_look_at_every_page() -> None:
    """It stands between one request and the next: with a full cache of many pages the next one must not wait."""
    cache = make_cache(pages=20_000, recurrent=False)
    sequence = make_sequence(list(range(80_000)))
    assert cache.admit(sequence)
    sequence.computed = 80_000
    cache.commit(sequence)
    cache.release(sequence)
    begun = time.perf_counter()
    cache.check_integrity([])
    whole = time.perf_counter() - begun
    begun = time.perf_counter()
    for _ in range(10):
        cache.check_idle()
    assert time.perf_counter() - begun < whole


def test_what_was_reused_is_told_and_added_up() -> None:
    cache = make_cache(pages=64)
    ran(cache, list(range(20)), {6: BoundaryKind.SYSTEM}, session="a")
    sequence = make_sequence([*range(7), 50, 51, 52], session="a")
    assert cache.admit(sequence)
    told = cache.reused(sequence)
    assert (told.tokens, told.tier, told.kind, told.changed) == (6, "device", BoundaryKind.SYSTEM, 7)
    cache.release(sequence)
    counts = cache.reuse
    assert (counts.prompts, counts.hits, counts.prompt_tokens) == (2, 1, 30)
    assert (counts.tiers, counts.kinds) == ({"device": 6}, {"system": 1})
    assert (counts.changed, counts.repeated) == (20 + 3, 1)
    assert [each.prompt for each in counts.recent] == [20, 10]


def test_packed_tokens_are_little_endian() -> None:
    assert packed([1, 256, 150_000]) == b"\1\0\0\0\0\1\0\0" + (150_000).to_bytes(4, "little")


def test_a_page_that_would_be_copied_makes_way_where_all_pages_are_needed() -> None:
    """While it is copied it is in use, so a prompt that takes every page cannot have the tail that lies in it."""
    cache = make_cache(pages=4, recurrent=False)
    first = make_sequence(list(range(16)))
    assert cache.admit(first)
    compute(cache, first, 16)
    cache.release(first)
    second = make_sequence([*range(6), *range(50, 60)])
    assert cache.admit(second)
    assert second.computed == 4
    compute(cache, second, 12)
    cache.check_integrity([second])
    cache.release(second)
    third = make_sequence([*range(6), 70])
    assert cache.admit(third)
    assert third.computed == 6  # with room for it, to the token
