"""What the cache knows of a request while it lives, and of a sequence while it runs."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field

from ftengine.cache.captures import Planned
from ftengine.cache.node import Anchor, Node, Use, standing
from ftengine.cache.sessions import Turn
from ftengine.cache.tiers.base import TOKEN_BYTES, Found, Ticket
from ftengine.core import Reused, Sequence


@dataclass(eq=False)
class Known:
    """Of a request, from its first admission on, through preemption.

    direct: the lower tiers failed to give what they had; they are not asked again
    """

    turn: Turn
    packed: bytearray  # its tokens, as far as `pack` was asked for them
    reused: Reused | None = None
    direct: bool = False

    def pack(self, sequence: Sequence) -> bytearray:
        """All its tokens, packed; only new ones are converted."""
        done = len(self.packed) // TOKEN_BYTES
        if done < len(sequence.tokens):
            self.packed += packed(sequence.tokens[done:])
        return self.packed


@dataclass(frozen=True)
class Restore:
    """A transfer from the lower tiers into a sequence's pages and slot."""

    ticket: Ticket
    found: Found


@dataclass(eq=False)
class Place:
    """Of a running sequence.

    node: its deepest full page in the tree
    anchor: the last one made or gone on from; it may be gone by now
    tried: tokens at which a state was last to be kept, in vain perhaps
    """

    known: Known
    node: Node
    anchor: Anchor | None
    tried: int = 0
    planned: list[Planned] = field(default_factory=list)
    restore: Restore | None = None

    @property
    def turn(self) -> Turn:
        return self.known.turn

    def use(self, now: float) -> Use:
        return Use(self.turn.session, self.turn.side, self.turn.number, now)

    def behind(self) -> int:
        """Tokens before its last anchor, or before where one was last wanted."""
        self.anchor = standing(self.anchor)
        return max(self.tried, 0 if self.anchor is None else self.anchor.position)


def packed(tokens: list[int]) -> bytes:
    """int32, little-endian."""
    numbers = array("i", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
