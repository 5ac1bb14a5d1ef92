"""Keeps control tokens in content apart from those that the template writes.

A user's text or a tool's output may hold `<|im_end|>` or `<tool_call>` as characters. Encoded as the control token it
would end the turn or open a call, so content must reach the model as plain text. The template, however, is the
checkpoint's own program and returns one string. So each such string is broken in content by a guard character after
its first character, before rendering. Afterwards only the template's own tokens match; they become ids, the guards are
taken out, and the text between is encoded with control tokens switched off. The guard is a Unicode noncharacter; where
content holds one itself, it is doubled, so nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

GUARD = "\ufdd0"
_UNGUARD = re.compile(f"{GUARD}({GUARD}?)")
# Templates look for some of these in content and cut it there, whether or not the vocabulary has them as tokens.
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class ControlTokens:
    """The control tokens of one vocabulary, as a pattern. `tokens` may be empty."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token for token in tokens if len(token) > 1)
        self.longest = max(map(len, self._tokens), default=0)  # characters
        guarded = self._tokens.union(MARKUP)
        self._guarded = re.compile(_alternation(guarded))
        self._guarded_starts = re.compile(f"(?s)(?={_alternation(guarded)})(.)")
        self._split = re.compile(f"({_alternation(self._tokens)})") if self._tokens else None
        # A template may write "<" + key + ">"; a schema's key must not complete a token that way.
        self._cores = frozenset(token[1:-1] for token in guarded if token[0] == "<" and token[-1] == ">")

    def guard(self, value: Any) -> Any:
        """A copy of a JSON-like value in which no string, key included, reads as a control token."""
        if isinstance(value, str):
            return self.guard_text(value)
        if isinstance(value, dict):
            return {self._guard_key(key): self.guard(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.guard(item) for item in value]
        return value

    def pieces(self, rendered: str) -> list[str]:
        """Text and control tokens in turn, beginning and ending with text."""
        return self._split.split(rendered) if self._split is not None else [rendered]

    def guard_text(self, text: str) -> str:
        if GUARD in text:
            text = text.replace(GUARD, GUARD * 2)
        if self._guarded.search(text) is None:
            return text
        return self._guarded_starts.sub(rf"\1{GUARD}", text)

    def _guard_key(self, key: Any) -> Any:
        if not isinstance(key, str):
            return key
        return key[0] + GUARD + key[1:] if key in self._cores else self.guard_text(key)


def unguarded(text: str) -> str:
    """Text as the model sees it."""
    return _UNGUARD.sub(r"\1", text) if GUARD in text else text


def _alternation(words: Iterable[str]) -> str:
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return "(?:" + "|".join(map(re.escape, longest_first)) + ")"
