"""Which conversation a prompt goes on with, and what that conversation had before. Torch-free.

A client's own key names its session; within one, side requests (titles, compactions, sub-agents) are conversations of
their own. Without a key, and among side requests, a prompt belongs to the conversation most of whose last prompt it
repeats, tools and system text not counted: those are the same in many.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy

from ftengine.cache.tiers.base import TOKEN_BYTES

LIVE_SECONDS = 30 * 60.0
MOST_BYTES = 64 << 20  # of remembered paths
MOST_CONVERSATIONS = 256
SAME = 0.5  # of a conversation's last prompt that one without a key must repeat to go on with it


@dataclass(frozen=True)
class Turn:
    """One request, as its conversation sees it.

    session: names the conversation, also where the client gave no key
    number: of the turn; grows with time, also over processes; only equality and order within a process mean something
    changed: the first token that differs from what the conversation, or if it is new any other, had before
    known: the longest beginning that it shares with any remembered path, in tokens
    """

    session: str
    side: bool
    number: int
    changed: int
    known: int


@dataclass(eq=False)
class _Conversation:
    """path: the last prompt, and its answer once that is over; prompt: the tokens of the former.
    cuts: turn and position, both rising: what was deeper than the position before that turn is not of the path.
    """

    name: str
    key: str
    side: bool
    path: bytes = b""
    prompt: int = 0
    turn: int = 0
    last_used: float = 0.0
    cuts: list[tuple[int, int]] = field(default_factory=list)


class Sessions:
    """Bounded: the conversations that were used last."""

    def __init__(self) -> None:
        self._conversations: dict[str, _Conversation] = {}  # by name, least recently used first
        self._bytes = 0
        self._numbers = itertools.count(int(time.time() * 1000))
        self._prefix = secrets.token_hex(3)  # names of this process are no other one's
        self._unnamed = itertools.count(1)

    def begin(self, tokens: bytes, session: str, side: bool, now: float, system: int = 0) -> Turn:
        """A request is admitted for the first time.

        tokens: its prompt, packed; session, side: the request's own; now: monotonic seconds; system: tokens of tools
        and system text at its start.
        """
        found, shared = self._find(tokens, session, side, system)
        known = max(shared, longest_common(tokens, (each.path for each in self._conversations.values())))
        if found is None:
            found = self._new(session, side)
            changed = known
        else:
            changed = shared
        found.turn, found.last_used = next(self._numbers), now
        while found.cuts and found.cuts[-1][1] >= changed:
            found.cuts.pop()
        if changed * TOKEN_BYTES < len(found.path):
            found.cuts.append((found.turn, changed))
        found.prompt = len(tokens) // TOKEN_BYTES
        self._remember(found, tokens)
        return Turn(found.name, side, found.turn, changed, known)

    def end(self, turn: Turn, tokens: bytes, now: float) -> None:
        """The request is over. tokens: prompt and answer, packed."""
        found = self._conversations.get(turn.session)
        if found is not None and found.turn == turn.number:
            found.last_used = now
            self._remember(found, tokens)

    def live(self, session: str, now: float) -> bool:
        """Whether it is a main conversation that was going on lately."""
        found = self._conversations.get(session)
        return found is not None and not found.side and now - found.last_used < LIVE_SECONDS

    def turn(self, session: str) -> int:
        """The number of its last turn; -1 for one not known."""
        found = self._conversations.get(session)
        return -1 if found is None else found.turn

    def superseded(self, session: str, turn: int, position: int) -> bool:
        """Whether what that turn kept at `position` is no longer on the conversation's path."""
        found = self._conversations.get(session)
        if found is None:
            return False
        return any(when > turn and cut < position for when, cut in found.cuts)

    def clear(self) -> None:
        self._conversations.clear()
        self._bytes = 0

    def _find(self, tokens: bytes, key: str, side: bool, system: int) -> tuple[_Conversation | None, int]:
        """The conversation that goes on, and how many tokens of its path are repeated."""
        if key and not side:
            found = self._conversations.get(key)
            return found, 0 if found is None else common_tokens(found.path, tokens)
        best, most, share = None, 0, SAME
        for each in self._conversations.values():
            own = max(1, each.prompt - system)
            least = max(1, system + math.ceil(share * own))
            if each.key == key and each.side == side and _agree(each.path, tokens, (least - 1) * TOKEN_BYTES):
                shared = common_tokens(each.path, tokens)
                if shared >= least:
                    best, most, share = each, shared, min(1.0, (shared - system) / own)
        return best, most

    def _new(self, key: str, side: bool) -> _Conversation:
        name = key if key and not side else f"{key}~{self._prefix}{next(self._unnamed)}"
        made = self._conversations[name] = _Conversation(name, key, side)
        return made

    def _remember(self, found: _Conversation, tokens: bytes) -> None:
        self._bytes += len(tokens) - len(found.path)
        found.path = tokens
        self._conversations[found.name] = self._conversations.pop(found.name)
        while len(self._conversations) > 1 and (
            self._bytes > MOST_BYTES or len(self._conversations) > MOST_CONVERSATIONS
        ):
            oldest = next(iter(self._conversations))
            self._bytes -= len(self._conversations.pop(oldest).path)


def common_tokens(one: bytes, other: bytes) -> int:
    """Tokens at the start of both, packed."""
    length = min(len(one), len(other)) // TOKEN_BYTES
    differs = numpy.frombuffer(one, "<i4", length) != numpy.frombuffer(other, "<i4", length)
    return int(differs.argmax()) if differs.any() else length


def longest_common(tokens: bytes, paths: Iterable[bytes]) -> int:
    """The longest beginning of `tokens` that is one of a path, in tokens."""
    longest = 0
    for path in paths:
        if _agree(path, tokens, longest * TOKEN_BYTES):  # else it cannot be longer
            longest = max(longest, common_tokens(path, tokens))
    return longest


def _agree(one: bytes, other: bytes, at: int) -> bool:
    """Whether the token at this byte is the same, before the whole is looked at."""
    return one[at : at + TOKEN_BYTES] == other[at : at + TOKEN_BYTES] != b""
