"""Which part of an assistant turn, as the template rendered it, is replaced by the tokens that were generated.

All of it as a rule. Where the template left the reasoning of an earlier turn out, only what it kept: from the token
that ends the reasoning if it still writes that, else from the first call on. A turn's values were compared before
(generations.py), so it is enough to look at control tokens here, and that the turn is the one that is meant. What the
model itself wrote as control tokens inside its reasoning or its arguments, a draft of a call for instance, is text in
the template's rendering and does no harm.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ftengine.dialect.control import unguarded
from ftengine.dialect.generations import Control, Generated
from ftengine.dialect.landmarks import Landmarks

_OPENING = Control(0, 0, "")


@dataclass(frozen=True)
class Splice:
    """Pieces from `begin` to before `end` become the generated tokens from `control` on."""

    begin: int
    end: int
    control: Control
    with_stop: bool  # the generated stop token included


def find_splice(
    pieces: list[str], opening: int, openers: Set[int], marks: Landmarks, answer: Generated
) -> Splice | None:
    """`opening`: where the turn's control token stands in the pieces. None: the turn stays as it was rendered."""
    end = _turn_end(pieces, opening, openers, marks)
    if end is None or not _says_the_same(pieces[opening:end], answer):
        return None
    replaced = _from_where(pieces, opening, end, marks, answer)
    if replaced is None:
        return None
    # A token that ends a turn by beginning the next one (GLM's <|user|>) is the next message's.
    with_stop = bool(answer.stop) and pieces[end] == answer.stop and end not in openers
    return Splice(replaced[0], end + 1 if with_stop else end, replaced[1], with_stop)


def _turn_end(pieces: list[str], opening: int, openers: Set[int], marks: Landmarks) -> int | None:
    for at in range(opening + 2, len(pieces), 2):
        if at in openers or pieces[at] in marks.turn_ends:
            return at
    return None


def _says_the_same(pieces: list[str], answer: Generated) -> bool:
    """Templates that make two messages of a turn, or none, could otherwise set one turn in another one's place."""
    shown = unguarded("".join(pieces))
    return all(text.strip() in shown for text in answer.said) and all(call.name in shown for call in answer.calls)


def _from_where(
    pieces: list[str], opening: int, end: int, marks: Landmarks, answer: Generated
) -> tuple[int, Control] | None:
    """The first piece that is replaced, and the generated control token that takes its place."""
    shown = pieces[opening + 2 : end : 2]
    thought = shown.index(marks.think_end) if marks.think_end and marks.think_end in shown else -1
    ended = answer.think_end
    if thought < 0 and ended < 0:
        return opening, _OPENING
    if thought >= 0 and ended >= 0:
        at = opening + 2 + 2 * thought
        if _shows_reasoning(pieces, opening, at, answer):
            return opening, _OPENING
        return at, answer.controls[ended]
    rest = [control.content for control in answer.controls[ended + 1 :]]
    if rest and shown[thought + 1 :] == rest:
        return opening + 2 + 2 * (thought + 1), answer.controls[ended + 1]
    return None


def _shows_reasoning(pieces: list[str], opening: int, think_end: int, answer: Generated) -> bool:
    """Whether the template wrote the reasoning, in the tokens in which the prompt began it."""
    before = pieces[opening + 2 : think_end : 2]
    begun = [control.content for control in answer.controls[: answer.think_end]]
    if begun[: len(before)] != before or (begun and not before):
        return False
    return unguarded(pieces[think_end - 1]).strip().endswith(answer.reasoning.strip())
