"""Where messages, reasoning, calls and results begin and end in what a template writes, as control tokens.

Templates are programs; what they write around content is learned once, when the dialect opens, by rendering small
conversations whose every content is a word of its own. Between two such words stand the control tokens that end the
first and open the second. Content cannot hold control tokens (control.py), so in a rendered prompt each of them is the
template's own. A family whose roles are plain text (Mixtral's `[INST]`) has only the token that ends a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ftengine.core import BoundaryKind
from ftengine.dialect.control import ControlTokens
from ftengine.dialect.prompt.template import ChatTemplate, TemplateRefused

_USER, _NEXT, _ANSWER, _THOUGHT = "Marmot", "Otter", "Weasel", "Heron"
_FIRST, _FIRST_VALUE, _SECOND, _SECOND_VALUE = "Lynx", "Plover", "Badger", "Stoat"
_RESULT = "Curlew"
_WORD = re.compile(r"[A-Za-z]*")


@dataclass(frozen=True)
class Opener:
    """A message begins with `control` and, where several roles share it, `word` after it."""

    control: str
    word: str
    role: str  # user, assistant or tool


@dataclass(frozen=True)
class Landmarks:
    """Control tokens by what they mark; "": the template has none for it."""

    openers: tuple[Opener, ...] = ()
    turn_ends: frozenset[str] = frozenset()  # with which a model ends its turn
    think_end: str = ""
    call_start: str = ""
    call_end: str = ""
    result_start: str = ""
    result_end: str = ""
    result_intro: str = ""  # the text between a tool turn's opener and its first result, where a user's opens alike

    def roles(self, pieces: Sequence[str]) -> dict[int, str]:
        """Which control tokens open a message, and whose. pieces: text and control tokens in turn, content guarded."""
        controls, found = self.turn_starts, {}
        for at in range(1, len(pieces), 2):
            if pieces[at] in controls and (role := self._role_at(pieces, at)):
                found[at] = role
        return found

    @cached_property
    def turn_starts(self) -> frozenset[str]:
        return frozenset(opener.control for opener in self.openers)

    @cached_property
    def marks(self) -> dict[str, tuple[BoundaryKind, tuple[str, ...]]]:
        """Control tokens after which a part of a message begins or ends, and in whose messages they mean that."""
        # Results stand in turns of their own, unless the template has none for them (gemma: in the model's turn).
        apart = bool(self.result_intro) or any(opener.role == "tool" for opener in self.openers)
        holders = ("tool",) if apart else ("assistant",)
        marks: dict[str, tuple[BoundaryKind, tuple[str, ...]]] = {
            self.result_start: (BoundaryKind.RESULT_START, holders),
            self.result_end: (BoundaryKind.RESULT_END, holders),
            self.call_start: (BoundaryKind.CALL_START, ("assistant",)),
            self.call_end: (BoundaryKind.CALL_END, ("assistant",)),
            self.think_end: (BoundaryKind.THINKING, ("assistant",)),
        }
        marks.pop("", None)
        return marks

    @cached_property
    def spoken(self) -> tuple[str, ...]:
        """Of these, the ones that a model writes."""
        return tuple(mark for mark in (self.think_end, self.call_start, self.call_end) if mark)

    def _role_at(self, pieces: Sequence[str], at: int) -> str:
        control, after = pieces[at], pieces[at + 1]
        for opener in self.openers:
            if opener.control == control and after.startswith(opener.word):
                return "tool" if opener.role == "user" and self._is_result(pieces, at) else opener.role
        return ""

    def _is_result(self, pieces: Sequence[str], at: int) -> bool:
        intro, after = self.result_intro, pieces[at + 1]
        if not intro:
            return False
        if self.result_start:
            return after == intro and at + 2 < len(pieces) and pieces[at + 2] == self.result_start
        return after.startswith(intro)


def find_landmarks(
    template: ChatTemplate, control: ControlTokens, turn_ends: Iterable[str], reasoning_key: str
) -> Landmarks:
    return _Survey(template, control, frozenset(turn_ends), reasoning_key).landmarks()


class _Survey:
    """Small renderings of one template."""

    def __init__(
        self, template: ChatTemplate, control: ControlTokens, turn_ends: frozenset[str], reasoning_key: str
    ) -> None:
        self._template = template
        self._control = control
        self._turn_ends = turn_ends
        self._reasoning_key = reasoning_key

    def landmarks(self) -> Landmarks:
        user, answer, called = _message("user", _USER), _message("assistant", _ANSWER), self._called(_FIRST)
        more, result = _message("user", _NEXT), _result(_FIRST, _RESULT)
        if self._pieces([user]) == self._pieces([user], add_generation_prompt=True):
            ends = self._turn_ends  # it always begins an answer, so what follows a message is not only its end
        else:
            ends = frozenset().union(
                self._after([user], _USER),
                self._after([user, answer], _ANSWER),
                self._after([user, called], _FIRST_VALUE),
                self._after([user, called, result], _RESULT),
            )
        talk, loop = [user, answer, more, answer], [user, called, result, self._called(_SECOND), more]
        found = [
            self._opener("assistant", talk, _USER, _ANSWER, ends),
            self._opener("user", talk, _ANSWER, _NEXT, ends),
            self._opener("tool", loop, _FIRST_VALUE, _RESULT, ends),
        ]
        openers = _distinct([opener for opener in found if opener is not None])
        controls = {opener.control for opener in openers}
        think_end = self._first(self._after([user, {**called, self._reasoning_key: _THOUGHT}, result], _THOUGHT))
        call_start, call_end = self._call([user, called, result], controls | {think_end})
        result_start, result_end = _innermost(
            self._between(loop, _FIRST_VALUE, _RESULT)[1::2], self._after(loop[:3], _RESULT), controls
        )
        return Landmarks(
            openers=openers,
            turn_ends=self._turn_ends,
            think_end=think_end,
            call_start=call_start,
            call_end=call_end,
            result_start=result_start,
            result_end=result_end,
            result_intro=self._result_intro(loop, openers, result_start),
        )

    def _pieces(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[str]:
        variables = {"add_generation_prompt": add_generation_prompt, "enable_thinking": True, "thinking": True}
        try:
            return self._control.pieces(self._template.render(messages, tools=None, **variables))
        except TemplateRefused:
            return [""]

    def _between(self, messages: list[dict[str, Any]], first: str, second: str) -> list[str]:
        """Pieces between two words, the texts cut at them; empty where one is missing. "": from the beginning."""
        pieces = self._pieces(messages)
        begin = _holder(pieces, first, 0) if first else 0
        end = _holder(pieces, second, max(begin, 0))
        if begin < 0 or end <= begin:
            return []
        between = pieces[begin : end + 1]
        between[0] = between[0].rpartition(first)[2] if first else between[0]
        between[-1] = between[-1].partition(second)[0]
        return between

    def _after(self, messages: list[dict[str, Any]], word: str) -> list[str]:
        pieces = self._pieces(messages)
        at = _holder(pieces, word, 0)
        return pieces[at + 1 :: 2] if at >= 0 else []

    def _opener(
        self, role: str, messages: list[dict[str, Any]], before: str, content: str, ends: frozenset[str]
    ) -> Opener | None:
        between = self._between(messages, before, content)
        for at in range(1, len(between), 2):
            if between[at] not in ends:
                word = _WORD.match(between[at + 1])
                return Opener(between[at], word[0] if word else "", role)
        return None

    def _call(self, loop: list[dict[str, Any]], others: set[str]) -> tuple[str, str]:
        """Where each call has marks of its own, those between two calls; else those around the one wrapper."""
        results = [loop[-1], _result(_SECOND, _RESULT)]
        between = self._between([loop[0], self._called(_FIRST, _SECOND), *results], _FIRST_VALUE, _SECOND)[1::2]
        if len(between) > 1 and others.isdisjoint(between[-2:]) and between[-1] != between[-2]:
            return between[-1], between[-2]
        return _innermost(self._between(loop, _USER, _FIRST)[1::2], self._after(loop, _FIRST_VALUE), others)

    def _result_intro(self, loop: list[dict[str, Any]], openers: tuple[Opener, ...], result_start: str) -> str:
        if any(opener.role == "tool" for opener in openers):
            return ""
        user = next((opener for opener in openers if opener.role == "user"), None)
        between = self._between(loop, _FIRST_VALUE, _RESULT)
        if user is None or user.control not in between:
            return ""
        at = between.index(user.control)
        if result_start:
            return between[at + 1] if between[at + 2 : at + 3] == [result_start] else ""
        plain = self._between([loop[0], _message("assistant", _ANSWER), loop[-1]], _ANSWER, _NEXT)
        return between[at + 1] if plain and len(between[at + 1]) > len(plain[-1]) else ""

    @staticmethod
    def _first(controls: list[str]) -> str:
        return controls[0] if controls else ""

    def _called(self, *names: str) -> dict[str, Any]:
        values = {_FIRST: _FIRST_VALUE, _SECOND: _SECOND_VALUE}
        calls = [
            {"id": f"call{name}", "type": "function", "function": {"name": name, "arguments": {"path": values[name]}}}
            for name in names
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}


def _innermost(before: list[str], after: list[str], others: set[str]) -> tuple[str, str]:
    """The marks nearest to content that are a pair: quotes, alike on both sides, are passed over."""
    for start, end in zip(reversed(before), after, strict=False):
        if start in others or end in others:
            break
        if start != end:
            return start, end
    return "", ""


def _distinct(openers: list[Opener]) -> tuple[Opener, ...]:
    """Words only where a control token is shared, longer ones first. A tool turn that opens as a user's is left out."""
    shared = {opener.control for opener in openers if sum(o.control == opener.control for o in openers) > 1}
    kept: dict[tuple[str, str], Opener] = {}
    for opener in openers:
        word = opener.word if opener.control in shared else ""
        kept.setdefault((opener.control, word), Opener(opener.control, word, opener.role))
    return tuple(sorted(kept.values(), key=lambda opener: -len(opener.word)))


def _holder(pieces: list[str], word: str, start: int) -> int:
    """The text piece that holds the word; -1: none."""
    start += start % 2
    return next((at for at in range(start, len(pieces), 2) if word in pieces[at]), -1)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call{name}", "name": name}
