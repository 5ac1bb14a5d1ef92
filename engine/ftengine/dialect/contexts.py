"""Where in a conversation an assistant turn stands, as digests by which the same place is known again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from ftengine.dialect.prompt.turns import Turn

_in_order = json.JSONEncoder(sort_keys=True).encode


@dataclass(frozen=True)
class Place:
    """before: digest of all turns before this one. within: of these, of the turn itself, and of the one after it."""

    before: bytes
    within: bytes


class Contexts:
    """Places of a conversation's turns, asked for in ascending order.

    A turn before a place counts as it is when the place is asked for: with the values that the model wrote, where it
    was recognised by then. Left out is what clients change in a turn from one request to the next: reasoning, ids, and
    the white space between the parts of what the assistant said.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._at = 0
        self._running = hashlib.blake2b(digest_size=16)

    def before(self, at: int) -> bytes:
        for turn in self._turns[self._at : at]:
            self._running.update(_content(turn))
        self._at = max(self._at, at)
        return self._running.digest()

    def place(self, at: int) -> Place:
        before = self.before(at)
        within = self._running.copy()
        for turn in self._turns[at : at + 2]:
            within.update(_content(turn))
        return Place(before, within.digest())


def _content(turn: Turn) -> bytes:
    """No two sequences of turns have the same joined contents: each field is preceded by its length."""
    fields = [turn.role, turn.text]
    if turn.role == "assistant":
        fields[1] = "".join(turn.text.split())
        for call in turn.calls:
            fields += (call.name, _in_order(call.arguments))
    encoded = [value.encode("utf-8", "surrogatepass") for value in fields]
    return b"%d:" % len(encoded) + b"".join(b"%d:%b" % (len(value), value) for value in encoded)
