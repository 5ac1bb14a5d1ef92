"""Which conversation a prompt goes on with, and what is told of it."""

from __future__ import annotations

import random
import time
from itertools import takewhile

from ftengine.cache import sessions as module
from ftengine.cache.place import packed
from ftengine.cache.sessions import LIVE_SECONDS, Sessions, common_tokens, longest_common

SYSTEM = list(range(1000, 1100))


def begin(
    sessions: Sessions, tokens: list[int], key: str = "", *, side: bool = False, now: float = 0.0, system: int = 0
):
    return sessions.begin(packed(tokens), key, side, now, system)


def test_common_tokens_against_lists() -> None:
    chance = random.Random(1)
    for _ in range(300):
        one, other = ([chance.randrange(2) for _ in range(chance.randrange(8))] for _ in range(2))
        expected = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        assert common_tokens(packed(one), packed(other)) == expected
        paths = [[chance.randrange(2) for _ in range(chance.randrange(8))] for _ in range(5)]
        best = max(common_tokens(packed(one), packed(path)) for path in paths)
        assert longest_common(packed(one), [packed(path) for path in paths]) == best


def test_the_first_changed_token_is_told_against_the_sessions_own_last_path() -> None:
    sessions = Sessions()
    first = begin(sessions, [*SYSTEM, 1, 2, 3], "a")
    assert (first.changed, first.known) == (0, 0)
    sessions.end(first, packed([*SYSTEM, 1, 2, 3, 4, 5]), 1.0)
    begin(sessions, [*SYSTEM, 1, 2, 3, 4, 5, 6, 7, 8], "b")
    turn = begin(sessions, [*SYSTEM, 1, 2, 3, 4, 5, 6, 7, 9], "a")
    assert (turn.session, turn.changed, turn.known) == ("a", 105, 107)  # "b" had two tokens more
    new = begin(sessions, [*SYSTEM, 7, 7], "c")
    assert (new.changed, new.known) == (100, 100)


def test_without_keys_two_conversations_with_one_system_text_are_two() -> None:
    sessions = Sessions()
    one, other = [*SYSTEM, 1, 1, 1, 1], [*SYSTEM, 2, 2, 2, 2]
    names: list[set[str]] = [set(), set()]
    for turn in range(6):
        for number, tokens in enumerate((one, other)):
            names[number].add(begin(sessions, tokens, system=100, now=turn).session)
            tokens += [10 * number + turn] * 9
    assert [len(name) for name in names] == [1, 1]
    assert names[0] != names[1]
    shortened = begin(sessions, [*one[:-12], 7, 8, 9], system=100)  # its last turns are edited
    assert shortened.session in names[0]


def test_side_requests_are_conversations_of_their_own() -> None:
    sessions = Sessions()
    main = begin(sessions, [*SYSTEM, 1], "a")
    title = begin(sessions, [5, 6, 7, 8], "a", side=True)
    agent = begin(sessions, [50, 60, 70, 80, 90], "a", side=True)
    again = begin(sessions, [50, 60, 70, 80, 90, 91, 92], "a", side=True)
    assert len({main.session, title.session, agent.session}) == 3
    assert again.session == agent.session
    assert again.changed == 5
    assert sessions.live("a", 0.0)
    assert not sessions.live(agent.session, 0.0)
    assert sessions.turn("a") == main.number


def test_live_is_what_was_used_within_half_an_hour() -> None:
    sessions = Sessions()
    begin(sessions, [1, 2, 3], "a", now=100.0)
    assert sessions.live("a", 100.0 + LIVE_SECONDS - 1)
    assert not sessions.live("a", 100.0 + LIVE_SECONDS)
    assert not sessions.live("never heard of", 100.0)


def test_what_was_cut_off_is_superseded_and_what_remains_is_not() -> None:
    """Against a list of the positions that each turn left on the path."""
    chance, sessions = random.Random(3), Sessions()
    path: list[int] = []
    kept: list[tuple[int, int, bool]] = []  # turn, position, still on the path
    for _ in range(200):
        cut = chance.randrange(len(path) + 1) if chance.random() < 0.3 else len(path)
        path = [*path[:cut], *(chance.randrange(1 << 30) for _ in range(chance.randrange(1, 9)))]
        turn = begin(sessions, path, "a")
        kept = [(number, at, on and at <= cut) for number, at, on in kept]
        kept += [(turn.number, at, True) for at in range(turn.changed + 1, len(path) + 1)]
        for number, at, on in kept:
            assert sessions.superseded("a", number, at) == (not on)
        kept = kept[-100:]


def test_memory_is_bounded_and_the_oldest_are_forgotten(monkeypatch) -> None:
    sessions = Sessions()
    monkeypatch.setattr(module, "MOST_BYTES", 40_000)
    for number in range(30):
        begin(sessions, [number] * 1000, f"s{number}")
    assert not sessions.live("s19", 0.0)
    assert sessions.live("s20", 0.0)
    begin(sessions, [1] * 50_000, "large")
    assert sessions.live("large", 0.0)
    assert not sessions.live("s29", 0.0)
    monkeypatch.setattr(module, "MOST_CONVERSATIONS", 3)
    for number in range(5):
        begin(sessions, [number] * 10, f"t{number}")
    assert [sessions.live(f"t{number}", 0.0) for number in range(5)] == [False, False, True, True, True]


def test_an_end_that_comes_late_changes_nothing() -> None:
    sessions = Sessions()
    first = begin(sessions, [1, 2, 3], "a")
    begin(sessions, [1, 2, 3, 4], "a")
    sessions.end(first, packed([1, 2, 3, 9, 9, 9]), 5.0)
    assert begin(sessions, [1, 2, 3, 4, 5], "a").changed == 4


def test_a_long_prompt_among_many_conversations_takes_little_time() -> None:
    """60,000 tokens, 200 conversations with the same long beginning; the whole lookup has 2 ms."""
    chance, sessions = random.Random(2), Sessions()
    base = [chance.randrange(150_000) for _ in range(60_000)]
    for number in range(200):
        begin(sessions, [*base[:20_000], *(chance.randrange(150_000) for _ in range(50))], f"s{number}")
    tokens, best = packed(base), 1.0
    for number in range(5):
        begun = time.perf_counter()
        sessions.begin(tokens, f"new{number}", False, 0.0)
        best = min(best, time.perf_counter() - begun)
    assert best < 0.01
