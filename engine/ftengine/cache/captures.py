"""Where in a path of tokens anchors are wanted, and which of those places go without when slots are short.

A chunk of prefill is never cut into small steps for their sake: the model keeps states in the middle of a step.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from ftengine.core import Boundary, BoundaryKind, Request

SPACING = 512  # tokens between two anchors inside what is new, at most
SHORTEST = 1024  # tokens; a step is not shortened below that so that its anchors find slots
FIRST = (
    BoundaryKind.SYSTEM,
    BoundaryKind.PROMPT_END,
    BoundaryKind.QUESTION_END,
    BoundaryKind.LAST_USER,
    BoundaryKind.MESSAGE,
)


@dataclass(frozen=True)
class Planned:
    """A state that a step will leave in a slot; the slot is the plan's until then."""

    position: int
    kind: BoundaryKind
    slot: int


def places(
    request: Request, start: int, end: int, behind: int, page_size: int, spacing: int = SPACING
) -> list[Boundary]:
    """The places in (start, end] where a state is wanted, in order.

    The prompt's last token is computed again for its logits by whoever asks the same, and it is the one that often
    changes in the next turn; so what is kept is the state before it, instead of the one at the prompt's end.
    behind: the last place before `start` that has an anchor. Boundaries beyond the prompt's end count as its end.
    """
    last = len(request.prompt) - 1
    named = [
        boundary
        for boundary in request.boundaries[_first(request.boundaries, start) : _first(request.boundaries, end)]
        if boundary.position < last
    ]
    if start < last <= end:
        named.append(Boundary(last, BoundaryKind.PROMPT_END))
    found: list[Boundary] = []
    for boundary in [*named, None]:
        stop = end + 1 if boundary is None else boundary.position
        spaced = between(behind, max(behind, start), stop, page_size, spacing)
        found += [Boundary(at, BoundaryKind.SPACING) for at in spaced]
        if boundary is not None:
            found.append(boundary)
            behind = boundary.position
    return found


def between(behind: int, start: int, stop: int, page_size: int, spacing: int) -> list[int]:
    """Places in (start, stop) that leave no gap larger than `spacing` after `behind`, where that is still to be had; at
    page boundaries, where no tail is to be copied."""
    first = max((behind + spacing) // page_size, start // page_size + 1) * page_size
    return list(range(first, stop, max(page_size, spacing // page_size * page_size)))


def thinned(wanted: list[Boundary], room: int, start: int) -> list[Boundary]:
    """At most `room` of them: tools and system text, the prompt's end and the last messages, then as even as can be."""
    if len(wanted) <= room:
        return wanted
    # Later ones first among equals: the end of a prompt is where the next one departs.
    ranked = sorted((each for each in wanted if each.kind in FIRST), key=lambda each: -each.position)
    chosen = sorted(ranked, key=lambda each: FIRST.index(each.kind))[: min(room, _protected(ranked))]
    taken = [start, *(each.position for each in chosen)]
    # Distance to the nearest one that is taken; the farthest goes next.
    left = {each: min(abs(each.position - at) for at in taken) for each in wanted if each not in chosen}
    while len(chosen) < room:
        farthest = max(left, key=left.__getitem__)
        del left[farthest]
        chosen.append(farthest)
        left = {each: min(near, abs(each.position - farthest.position)) for each, near in left.items()}
    return sorted(chosen, key=lambda each: each.position)


def _protected(ranked: list[Boundary]) -> int:
    """All that are not plain messages, and two of those if they are the prompt's last: others are as good as any place
    near by, and would leave wide gaps."""
    messages = sum(each.kind is BoundaryKind.MESSAGE for each in ranked)
    last = any(each.kind is BoundaryKind.PROMPT_END for each in ranked)
    return len(ranked) - messages + (min(2, messages) if last else 0)


def _first(boundaries: list[Boundary], position: int) -> int:
    """Index of the first boundary beyond `position`."""
    return bisect.bisect_right(boundaries, position, key=lambda each: each.position)
