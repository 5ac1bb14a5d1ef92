"""What the cache of running sequences asks of the tiers below the device: find, restore, keep.

Torch-free. Called from the step loop only; the work is done in a thread of the tiers' own, and tickets tell how far it
is. Tokens are packed: int32, little-endian, four bytes a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ftengine.core import BoundaryKind

TOKEN_BYTES = 4
CHUNK_TOKENS = 512

TierName = Literal["host", "disk"]


@dataclass(frozen=True)
class Found:
    """The deepest place below `limit` from which a path can be restored."""

    tokens: int
    tier: TierName  # the slowest one that has a part of it
    kind: BoundaryKind | None
    handle: Any = None  # the tiers' own
    bytes: int = 0  # that a restore carries to the device


@dataclass(eq=False)
class Ticket:
    """One transfer under way. Set by the tiers' thread, `done` last; read by the step loop.

    unwanted: set by the step loop, of a copy that reads what is needed now: it may end before it is whole.
    """

    done: bool = False
    tokens: int = 0  # of a restore: how many tokens from the path's start are in place; less than found: see reason
    reason: str = ""
    unwanted: bool = False


@dataclass(frozen=True)
class Kept:
    """An anchor on the device that the lower tiers may copy.

    tokens: the whole path to the anchor, packed
    pages: the full pages of that path, in order
    companion: the page that holds the keys and values of the tokens after the last full page; -1: there are none
    slot: of the recurrent state; -1 for models without one
    """

    tokens: bytes
    pages: list[int]
    companion: int
    slot: int
    kind: BoundaryKind
    session: str  # as Sessions names it
    side: bool
    turn: int = 0  # of the session; see value.Worth


@dataclass(frozen=True)
class TierSizes:
    """Of one tier, in bytes and counts."""

    name: TierName
    budget: int
    used: int = 0
    chunks: int = 0
    anchors: int = 0
    evictions: int = 0
    written: int = 0  # bytes since start
    read: int = 0
    failures: int = 0  # records that did not match what they should be
    details: dict[str, Any] = field(default_factory=dict)


class Tiers(Protocol):
    def find(self, tokens: bytes, limit: int, above: int) -> Found | None:
        """The deepest restorable place in tokens[:limit] that is deeper than `above` tokens. No I/O; <= 1 ms for 60,000
        tokens."""
        ...

    def restore(
        self,
        found: Found,
        tokens: bytes,
        start: int,
        pages: list[int],
        slot: int,
        session: str = "",
        side: bool = False,
        turn: int = 0,
    ) -> Ticket:
        """Fills `pages` (device pages of the path from its start; those of the first `start` tokens, a multiple of the
        page size, are in place and are not written) and state `slot` up to found.tokens. The last page may become
        partly filled. Nothing else may touch these until the ticket is done; but what the device computes before this
        call may still write to them: nothing is to be written there before that has ended.

        session, side, turn: whose request it is, for what the records are worth.
        """
        ...

    def keep(self, kept: Kept) -> Ticket | None:
        """Copies what is not below yet. The caller holds pages, companion and slot until the ticket is done; None:
        nothing is to be copied. What the device computed before this call is in place when it is copied."""
        ...

    def forget(self, tokens: bytes) -> None:
        """This path led to numbers that are none: nothing that was kept of it, nor what grew on that, is to be found
        again. Copies under way count, too. Seldom."""
        ...

    def sizes(self) -> list[TierSizes]: ...

    def rest(self, idle: bool) -> None:
        """Called from the step loop before it waits for work, and after: between the two there is time for what would
        hold up steps."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if budgets or books are wrong. Cheap enough for an idle moment."""
        ...

    def close(self, seconds: float) -> None:
        """Writes what is worth it to disk for at most `seconds`, then ends."""
        ...
