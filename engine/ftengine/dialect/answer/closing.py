"""Whether a tag inside an XML parameter's text ends it or belongs to it.

Models write code and documents that contain these very tags, so a tag alone proves nothing. A true end is followed by
what can follow one: the next parameter, the other closing tags, another call, the end of the output. Openings in the
text itself, at the start of a line, are counted, and their closings belong to the text too. Where text follows a
complete closing, a second complete closing without an opening before it shows that the first one was text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ftengine.dialect.answer.tags import (
    CALL,
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    XML_TAGS,
    begins,
    read_name,
    skip_space,
)

TAIL = 2048  # characters after a complete closing that are looked at for another one
DEEPEST = 32  # openings remembered; text that only mentions tags never closes them
_COMPLETE = re.compile(r"</parameter>\s*</function>\s*</tool_call>")
_OPENING = re.compile(r"<tool_call>|<function=")
_KIND = {CALL: CALL, CALL_END: CALL, FUNCTION: FUNCTION, FUNCTION_END: FUNCTION, PARAMETER: PARAMETER}
_KIND[PARAMETER_END] = PARAMETER


@dataclass(frozen=True)
class Closed:
    """`end`: position after the closing. `next_parameter`: a `<parameter=` stands there, else the call is over."""

    end: int
    next_parameter: bool


class Nesting:
    """Openings inside one parameter's text that have not been closed."""

    def __init__(self) -> None:
        self._open: list[tuple[str, bool]] = []

    def holds(self, tag: str) -> bool:
        """Whether the tag may belong to them: a closing to one of its kind, an opening to any."""
        kind = _KIND[tag] if tag.startswith("</") else None
        return any(at_line_start and kind in (None, opened) for opened, at_line_start in self._open)

    def note(self, tag: str, at_line_start: bool) -> None:
        """A tag that turned out to be text."""
        kind = _KIND[tag]
        if not tag.startswith("</"):
            self._open.append((kind, at_line_start))
            del self._open[:-DEEPEST]
            return
        for depth in range(len(self._open) - 1, -1, -1):
            if self._open[depth][0] == kind:
                del self._open[depth:]
                return


@dataclass(frozen=True)
class Place:
    """Where the tag stands. `fits(name, canonical)`: whether a parameter of that name may come next."""

    wrapped: bool  # the call began with <tool_call>
    nested: bool
    at_line_start: bool
    fits: Callable[[str, bool], bool]


def closing(text: str, at: int, place: Place, final: bool) -> Closed | bool | None:
    """False: the tag at `at` is the parameter's own text. None: more text is needed to know."""
    if text.startswith(PARAMETER, at):
        return _parameter_follows(text, at, place, final, after_end=False)
    if text.startswith((CALL, FUNCTION), at):
        return False
    after, seen = at, set()
    for tag in (PARAMETER_END, FUNCTION_END, CALL_END):
        here = skip_space(text, after)
        if text.startswith(tag, here):
            after = here + len(tag)
            seen.add(tag)
        elif not final and begins(text, here, XML_TAGS):
            return None
    follow = skip_space(text, after)
    if not final and begins(text, follow, XML_TAGS):
        return None
    if begins(text, follow, XML_TAGS):  # the output ends here, or in the middle of a tag
        return Closed(len(text), next_parameter=False)
    if seen == {PARAMETER_END} and text.startswith(PARAMETER, follow):
        return _parameter_follows(text, follow, place, final, after_end=True)
    if place.nested:
        return False
    if text.startswith(FUNCTION, follow) or (text.startswith(CALL, follow)):
        return Closed(after, next_parameter=False)
    return _text_follows(text, after, seen, place, final)


def _parameter_follows(text: str, at: int, place: Place, final: bool, *, after_end: bool) -> Closed | bool | None:
    name = read_name(text, at + len(PARAMETER) - 1)
    if name is True:  # the output may end inside the name
        return (Closed(len(text), next_parameter=False) if after_end and not place.nested else False) if final else None
    if name is False or place.nested:
        return False
    parameter, end = name
    if end == len(text) and not final:
        return None
    canonical = text.startswith("\n", end)
    if after_end:
        fits = place.fits(parameter, canonical)
    else:
        fits = place.fits(parameter, False) and canonical and place.at_line_start
    return Closed(at, next_parameter=True) if fits else False


def _text_follows(text: str, after: int, seen: set[str], place: Place, final: bool) -> Closed | bool | None:
    if FUNCTION_END not in seen:
        return False
    if CALL_END not in seen:
        bare = not place.wrapped and (PARAMETER_END in seen or place.at_line_start)
        return Closed(after, next_parameter=False) if bare else False
    tail = text[after : after + TAIL]
    another = _COMPLETE.search(tail)
    opening = _OPENING.search(tail)
    if another and (opening is None or another.start() < opening.start()):
        return False
    if opening is None and len(tail) < TAIL and not final:
        return None
    return Closed(after, next_parameter=False)
