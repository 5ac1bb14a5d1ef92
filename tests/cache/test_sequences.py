"""Pages and states of sequences without a model: what is stored is written by the test itself."""

from __future__ import annotations

import time

import pytest
import torch

from ftengine.cache.node import Snapshot
from ftengine.cache.policy import LruPolicy
from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache
from ftengine.core import CacheLayout, Request, SamplingParams, Sequence, StateSpec

PAGE = 4


def make_cache(pages: int = 16, slots: int = 0, spacing: int = 8) -> SequenceCache:
    states = ((StateSpec("s", (1,), "float32"),),) if slots else ()
    layout = CacheLayout(1, 1, 1, "float32", states)
    return SequenceCache(allocate_cache(layout, pages, PAGE, slots), pages, slots, LruPolicy(spacing))


def make_sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request("r", list(tokens), SamplingParams(max_tokens=1)), list(tokens))


def compute(cache: SequenceCache, sequence: Sequence, count: int) -> None:
    """As a model would: the state counts the tokens seen."""
    if cache.has_state:
        state = cache.tensors.states[0]["s"]
        if sequence.computed == 0:
            state[sequence.state_slot] = 0
        assert state[sequence.state_slot].item() == sequence.computed, "the state is not that of the computed tokens"
        state[sequence.state_slot] += count
    sequence.computed += count
    cache.commit(sequence)


def decode(cache: SequenceCache, sequence: Sequence, count: int) -> None:
    for token in range(count):
        sequence.tokens.append(100 + token)
        assert cache.reserve(sequence, len(sequence.tokens))
        compute(cache, sequence, 1)


def test_pages_are_taken_for_the_whole_prompt_and_given_back() -> None:
    cache = make_cache()
    sequence = make_sequence(list(range(10)))
    assert cache.admit(sequence)
    assert len(sequence.pages) == 3
    compute(cache, sequence, 10)
    cache.check_integrity([sequence])
    cache.release(sequence)
    cache.check_integrity([])
    assert (cache.pages.used_count, cache.tree.size, cache.available) == (2, 2, 16)


def test_admission_that_does_not_fit_changes_nothing() -> None:
    cache = make_cache(pages=4)
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
    cache = make_cache()
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
    cache = make_cache(pages=4)
    old = make_sequence(list(range(8)))
    assert cache.admit(old)
    compute(cache, old, 8)
    cache.release(old)
    new = make_sequence([90, 91])
    assert cache.admit(new)
    assert cache.reserve(new, 16)
    assert cache.tree.size == 0
    assert not cache.reserve(new, 17)
    cache.check_integrity([new])


def test_states_are_restored_exactly_at_their_page() -> None:
    """`compute` asserts that the restored state is that of the computed tokens."""
    cache = make_cache(slots=8, spacing=8)
    first = make_sequence(list(range(22)))
    assert cache.admit(first)
    for count in (4, 4, 4, 8, 2):  # snapshots at 8 (spacing), 20 (the prompt's last boundary)
        compute(cache, first, count)
    decode(cache, first, 9)  # 31 tokens: one moves along to 28
    cache.release(first)
    cache.check_integrity([])
    depths = sorted(node.depth * PAGE for node in cache.tree.snapshots)
    assert depths == [8, 20, 28]
    for tokens, expected in [
        (first.tokens, 28),
        (first.tokens[:28], 20),
        ([*first.tokens[:23], 7], 20),
        (first.tokens[:20], 8),
        ([*first.tokens[:15], 7, 7], 8),
        (first.tokens[:8], 0),
    ]:
        again = make_sequence(tokens)
        assert cache.admit(again)
        assert again.computed == expected
        compute(cache, again, len(tokens) - expected)
        cache.release(again)
        cache.check_integrity([])


@pytest.mark.parametrize("slots", [2, 3])
def test_snapshots_give_way_to_running_sequences(slots: int) -> None:
    cache = make_cache(slots=slots)
    running = []
    for index in range(slots):
        sequence = make_sequence([index * 10 + offset for offset in range(9)])
        assert cache.admit(sequence)
        compute(cache, sequence, 8)
        compute(cache, sequence, 1)
        running.append(sequence)
        cache.check_integrity(running)
    assert cache.tree.snapshots == set()
    for sequence in running:
        cache.release(sequence)
    cache.check_integrity([])


def test_a_snapshot_given_up_for_the_sequence_that_starts_from_it_is_still_its_start() -> None:
    """Under a policy that chooses just that one."""

    class NewestFirst(LruPolicy):
        def snapshot_rank(self, snapshot: Snapshot) -> tuple[float, float]:
            return (0.0, -snapshot.last_used)

    cache = make_cache(slots=2)
    cache.tree.policy = NewestFirst()
    for start in (0, 50):
        first = make_sequence(list(range(start, start + 9)))
        assert cache.admit(first)
        compute(cache, first, 4)
        cache.release(first)  # cancelled: its slot becomes the snapshot
    assert len(cache.tree.snapshots) == 2
    again = make_sequence(list(range(50, 59)))
    assert cache.admit(again)
    assert again.computed == 4
    compute(cache, again, 5)
    cache.check_integrity([again])


def test_the_only_slot_is_handed_from_the_snapshot_to_its_user() -> None:
    cache = make_cache(slots=1)
    first = make_sequence(list(range(9)))
    assert cache.admit(first)
    compute(cache, first, 8)
    cache.release(first)  # cancelled at a boundary: its slot becomes the snapshot
    assert len(cache.tree.snapshots) == 1
    second = make_sequence(list(range(9)))
    assert cache.admit(second)
    assert second.computed == 8
    compute(cache, second, 1)
    cache.release(second)
    cache.check_integrity([])


def test_pages_below_the_last_snapshot_are_not_kept() -> None:
    """They could never be matched: no state leads to them."""
    cache = make_cache(slots=4)
    sequence = make_sequence(list(range(40)))
    assert cache.admit(sequence)
    compute(cache, sequence, 16)  # a snapshot here
    compute(cache, sequence, 4)  # and none here: the spacing is 8
    sequence.computed += 2  # cancelled in the middle of a page
    cache.release(sequence)
    cache.check_integrity([])
    assert cache.tree.size == 4


def test_untrusted_pages_are_forgotten_with_all_that_grew_on_them() -> None:
    cache = make_cache(pages=30)
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


BREAKS = {
    "a page is leaked": lambda cache, sequence: cache.pages.allocate(),
    "a page has two owners": lambda cache, sequence: sequence.pages.append(sequence.pages[-1]),
    "a reference is leaked": lambda cache, sequence: cache.tree.acquire(next(iter(cache.tree.nodes()))),
    "a state slot is leaked": lambda cache, sequence: cache.slots.allocate(),
    "a snapshot is lost": lambda cache, sequence: cache.tree.snapshots.clear(),
    "not its path's": lambda cache, sequence: sequence.pages.reverse(),
}


@pytest.mark.parametrize("says", BREAKS)
def test_the_integrity_check_finds_what_it_is_for(says: str) -> None:
    cache = make_cache(slots=6)
    sequence = make_sequence(list(range(13)))
    assert cache.admit(sequence)
    compute(cache, sequence, 12)
    compute(cache, sequence, 1)
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


@pytest.mark.parametrize("says", ["a page is leaked", "a reference is leaked", "a state slot is leaked"])
def test_the_idle_check_finds_leaks(says: str) -> None:
    cache = make_cache(slots=6)
    sequence = make_sequence(list(range(13)))
    assert cache.admit(sequence)
    compute(cache, sequence, 12)
    compute(cache, sequence, 1)
    with pytest.raises(AssertionError, match="does not run"):
        cache.check_idle()
    cache.release(sequence)
    cache.check_idle()
    BREAKS[says](cache, sequence)
    with pytest.raises(AssertionError, match=says):
        cache.check_idle()


def test_the_idle_check_does_not_look_at_every_page() -> None:
    """It stands between one request and the next: with a full cache of many pages the next one must not wait."""
    cache = make_cache(pages=20_000)
    sequence = make_sequence(list(range(80_000)))
    assert cache.admit(sequence)
    compute(cache, sequence, 80_000)
    cache.release(sequence)
    begun = time.perf_counter()
    cache.check_integrity([])
    whole = time.perf_counter() - begun
    begun = time.perf_counter()
    for _ in range(10):
        cache.check_idle()
    assert time.perf_counter() - begun < whole
