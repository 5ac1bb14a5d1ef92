"""What goes first when room is short."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from ftengine.cache.place import packed
from ftengine.cache.sessions import LIVE_SECONDS, Sessions
from ftengine.cache.value import HALF_LIFE, LIKELIHOOD, Worth, rank, value
from ftengine.core import BoundaryKind

PLAIN = Worth(BoundaryKind.MESSAGE, "main", False, 100.0, uses=0, saved=500, bytes=1000, position=800)


def make_sessions() -> tuple[Sessions, int]:
    """A main conversation of 1,000 tokens at its second turn, and the number of that."""
    sessions = Sessions()
    sessions.begin(packed([1] * 900), "main", False, 90.0)
    turn = sessions.begin(packed([1] * 1000), "main", False, 100.0)
    return sessions, turn.number


def test_every_kind_has_its_likelihood() -> None:
    assert set(LIKELIHOOD) == set(BoundaryKind)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"saved": 501}, {}),
        ({"bytes": 999}, {}),
        ({"uses": 1}, {}),
        ({"last_used": 101.0}, {}),
        ({"kind": BoundaryKind.LAST_USER}, {}),
        ({}, {"kind": BoundaryKind.SPACING}),
    ],
)
def test_value_grows_with_what_is_saved_and_how_likely_it_is(better: dict, worse: dict) -> None:
    high, low = (dataclasses.replace(PLAIN, **change) for change in (better, worse))
    assert value(high, 150.0) > value(low, 150.0)


def test_value_halves_in_half_a_life_and_never_ends() -> None:
    assert value(PLAIN, 100.0 + HALF_LIFE) == pytest.approx(value(PLAIN, 100.0) / 2)
    assert value(PLAIN, 100.0 + 1e9) > 0


def test_side_requests_and_ended_conversations_go_before_anything_of_a_live_one() -> None:
    sessions, turn = make_sessions()
    least = dataclasses.replace(PLAIN, kind=BoundaryKind.SPACING, saved=1, bytes=10**9, last_used=0.0, turn=turn)
    best = {"saved": 10**6, "bytes": 1, "uses": 9, "last_used": 100.0, "turn": turn, "kind": BoundaryKind.SYSTEM}
    others = [
        dataclasses.replace(PLAIN, **best, side=True),
        dataclasses.replace(PLAIN, **best, session="another"),
        dataclasses.replace(PLAIN, **best, session=""),
    ]
    for other in others:
        assert rank(other, sessions, 100.0) < rank(least, sessions, 100.0)
    later = 100.0 + LIVE_SECONDS
    assert rank(least, sessions, later) < rank(others[0], sessions, later)


def test_the_ends_of_the_last_turn_and_the_system_text_go_last() -> None:
    sessions, turn = make_sessions()
    ends = (BoundaryKind.PROMPT_END, BoundaryKind.ANSWER_END)
    last = [
        dataclasses.replace(PLAIN, kind=kind, turn=turn, saved=1, bytes=10**9, last_used=0.0)
        for kind in (BoundaryKind.SYSTEM, *ends)
    ]
    plain = [
        dataclasses.replace(PLAIN, kind=kind, turn=turn - kind_is_end, saved=10**6, bytes=1, uses=9)
        for kind, kind_is_end in itertools.chain(
            ((kind, False) for kind in BoundaryKind if kind not in (*ends, BoundaryKind.SYSTEM)),
            ((kind, True) for kind in ends),  # of the turn before
        )
    ]
    assert max(rank(each, sessions, 100.0) for each in plain) < min(rank(each, sessions, 100.0) for each in last)


def test_what_a_conversation_cut_off_counts_as_over() -> None:
    sessions, turn = make_sessions()
    deep = dataclasses.replace(PLAIN, kind=BoundaryKind.ANSWER_END, position=1000, turn=turn)
    shallow = dataclasses.replace(PLAIN, kind=BoundaryKind.MESSAGE, position=300, turn=turn)
    sessions.begin(packed([1] * 300 + [2] * 50), "main", False, 100.0)
    assert rank(deep, sessions, 100.0)[0] == 0
    assert rank(shallow, sessions, 100.0)[0] == 1


def test_use_makes_it_the_users_but_a_side_request_takes_nothing_away() -> None:
    shared = dataclasses.replace(PLAIN)
    shared.use("side", True, 7, 120.0)
    assert (shared.session, shared.side, shared.turn, shared.uses, shared.last_used) == ("main", False, 0, 1, 120.0)
    shared.use("other", False, 8, 130.0)
    assert (shared.session, shared.side, shared.turn, shared.uses, shared.last_used) == ("other", False, 8, 2, 130.0)
