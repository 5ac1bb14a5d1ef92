"""What the lower tiers hold: chunks of keys and values, and anchors at which computing can go on. Torch-free.

A record is in host memory, on disk or both, and never changes. One that is in neither is not in the index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftengine.cache.tiers.arena import Block
from ftengine.cache.tiers.base import CHUNK_TOKENS, TOKEN_BYTES
from ftengine.cache.tiers.hashing import ROOT_KEY
from ftengine.cache.value import Worth
from ftengine.core import BoundaryKind


@dataclass(eq=False)
class Copy:
    """A record's content in the arena: keys and values, and the state. They are apart because states have all one size,
    and so do chunks: what one leaves fits the next."""

    tokens: Block | None
    state: Block | None

    def blocks(self) -> list[Block]:
        return [block for block in (self.tokens, self.state) if block is not None]

    @property
    def held(self) -> bool:
        return any(block.holds for block in self.blocks())

    def hold(self, by: int) -> None:
        """by: 1 before a transfer, -1 after it."""
        for block in self.blocks():
            block.holds += by


@dataclass(eq=False)
class Record:
    """key: see hashing.py. tokens: packed; of a chunk its own, of an anchor its tail.

    worth: of an anchor and, where keys and values are all that there is, of a chunk; else a chunk is worth what the
    anchors behind it are worth.
    host: where it lies in the arena; disk: bytes of its file; 0: it has none.
    unwritten: whether it is to be written to disk and is not yet.
    holds: transfers and paths being kept that need it; it stays in the index until they end.
    """

    key: bytes
    parent: Chunk | None
    tokens: bytes
    worth: Worth
    host: Copy | None = None
    disk: int = 0
    unwritten: bool = False
    holds: int = 0
    attached: bool = False

    @property
    def present(self) -> bool:
        return self.host is not None or self.disk > 0

    @property
    def start(self) -> int:
        """Tokens before its own."""
        return self.parent.end if self.parent is not None else 0

    @property
    def end(self) -> int:
        return self.worth.position

    @property
    def length(self) -> int:
        """Its own tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def path(self) -> Iterator[Chunk]:
        """The chunks before it, the deepest first."""
        node = self.parent
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


@dataclass(eq=False)
class Chunk(Record):
    """Keys and values of CHUNK_TOKENS tokens. The root has no parent, no tokens and no content.

    lengths: of the anchors' tails in packed bytes, the longest first; ordered: tokens of children and anchors in order.
    Both are replaced, never changed: whoever looks things up holds no lock.
    """

    children: dict[bytes, Chunk] = field(default_factory=dict)  # by tokens
    anchors: dict[bytes, Anchor] = field(default_factory=dict)  # by tail
    lengths: tuple[int, ...] = ()
    ordered: tuple[tuple[bytes, Record], ...] = ()

    def below(self) -> list[Record]:
        return [*self.children.values(), *self.anchors.values()]


@dataclass(eq=False)
class Anchor(Record):
    """Keys and values of a tail of less than CHUNK_TOKENS tokens and the recurrent state after it, if there is one.

    lasting: written to disk though a later one follows it in the same conversation; what others start from
    between: so, too, but not at once: without it there would be a wide gap; see spread.py
    born: seconds, on the clock of Worth.last_used, when it was kept
    """

    lasting: bool = False
    between: bool = False
    born: float = 0.0


def root() -> Chunk:
    chunk = Chunk(ROOT_KEY, None, b"", Worth(BoundaryKind.SPACING, "", False, 0.0))
    chunk.attached = True
    return chunk


def is_chunk(record: Record) -> bool:
    return len(record.tokens) == CHUNK_TOKENS * TOKEN_BYTES
