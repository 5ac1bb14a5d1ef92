"""Where anchors are wanted, and which places go without when slots are short."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from ftengine.cache.captures import SPACING, places, thinned
from ftengine.core import Boundary, BoundaryKind, Request, SamplingParams

KINDS = list(BoundaryKind)


def make_request(length: int, boundaries: list[Boundary]) -> Request:
    return Request("r", [1] * length, SamplingParams(1), boundaries=boundaries)


def test_every_boundary_is_a_place_and_no_gap_is_wider_than_the_spacing() -> None:
    """However the prompt is cut into chunks."""
    chance = random.Random(1)
    for _ in range(60):
        length = chance.randrange(2, 6000)
        at = sorted(chance.sample(range(1, length + 1), min(length, chance.randrange(12))))
        request = make_request(length, [Boundary(position, chance.choice(KINDS)) for position in at])
        found: list[Boundary] = []
        start = 0
        while start < length:
            end = min(length, start + chance.randrange(1, 3000))
            step = places(request, start, end, found[-1].position if found else 0, 16)
            assert all(start < each.position <= end for each in step)
            found += step
            start = end
        positions = [each.position for each in found]
        assert positions == sorted(set(positions))
        assert {position for position in at if position < length - 1} <= set(positions)
        assert (Boundary(length - 1, BoundaryKind.PROMPT_END) in found) == (length > 1)
        assert all(high - low <= SPACING for low, high in pairwise([0, *positions, length]))
        named = {*at, length - 1}
        assert all(each.position % 16 == 0 for each in found if each.position not in named)


def test_a_gap_that_was_left_is_closed_as_soon_as_it_can_be() -> None:
    found = places(make_request(10_000, []), 2000, 3000, 100, 16)
    assert [each.position for each in found] == [2016, 2528]


@pytest.mark.parametrize("room", range(12))
def test_the_places_that_matter_most_have_room_first(room: int) -> None:
    K = BoundaryKind
    wanted = [
        Boundary(100, K.SYSTEM), Boundary(200, K.MESSAGE), Boundary(300, K.CALL_END), Boundary(400, K.MESSAGE),
        Boundary(500, K.SPACING), Boundary(600, K.LAST_USER), Boundary(700, K.MESSAGE), Boundary(800, K.SPACING),
        Boundary(900, K.PROMPT_END),
    ]  # fmt: skip
    order = [100, 900, 600, 700, 400]
    found = thinned(wanted, room, 0)
    assert len(found) == min(room, len(wanted))
    assert found == sorted(found, key=lambda each: each.position)
    assert set(order[:room]) <= {each.position for each in found}


def test_what_is_left_over_is_spread_evenly() -> None:
    """No gap is more than about twice the mean one."""
    wanted = [Boundary(position, BoundaryKind.SPACING) for position in range(512, 30 * 512, 512)]
    for room in range(1, 30):
        positions = [0, *(each.position for each in thinned(wanted, room, 0)), 30 * 512]
        assert max(high - low for low, high in pairwise(positions)) <= 2.1 * 30 * 512 / room


def test_messages_in_the_middle_of_a_prompt_leave_no_wide_gap() -> None:
    """Two ends of messages side by side would leave nearly the whole step to be computed again."""
    wanted = [Boundary(at, BoundaryKind.MESSAGE) for at in (380, 430, 810, 860, 980, 1020)]
    positions = [0, *(each.position for each in thinned(wanted, 2, 0)), 1024]
    assert max(high - low for low, high in pairwise(positions)) < 700
