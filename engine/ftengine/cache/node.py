"""What the prefix tree consists of: nodes, each one full page, and anchors, from which computing can go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftengine.cache.value import Worth


@dataclass(frozen=True, slots=True)
class Use:
    """Who used a page last, and when (monotonic seconds)."""

    session: str = ""
    side: bool = False
    turn: int = 0
    when: float = 0.0


NEVER = Use()


@dataclass(eq=False, slots=True)
class Anchor:
    """The recurrent state after `tail`, and that part of a page's keys and values.

    tail: the tokens after the node's page, packed; fewer than a page's
    slot: of the state; its companion page holds the tail's keys and values; -1 once it was given up
    previous: the anchor before it on its path when it was made
    holds: copies under way that read it
    below: a lower tier has a copy, as far as is known
    """

    node: Node
    tail: bytes
    slot: int
    worth: Worth
    previous: Anchor | None = None
    holds: int = 0
    below: bool = False

    @property
    def position(self) -> int:
        """Tokens before it."""
        return self.worth.position

    def gap(self) -> int:
        """Tokens since the nearest anchor before it that is still there."""
        self.previous = standing(self.previous)
        return self.position - (0 if self.previous is None else self.previous.position)


def standing(anchor: Anchor | None) -> Anchor | None:
    """The anchor, or the nearest one before it that was not given up."""
    while anchor is not None and anchor.slot < 0:
        anchor = anchor.previous
    return anchor


@dataclass(eq=False, slots=True)
class Node:
    """One full page. `tokens` are this page's ids, packed; the root has none and no page.

    references: sequences and copies that use the path as far as just here
    active: children that are in use
    """

    tokens: bytes
    page: int
    depth: int  # pages from the root, this one included
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    anchors: dict[bytes, Anchor] = field(default_factory=dict)  # by tail
    references: int = 0
    active: int = 0
    use: Use = NEVER

    @property
    def in_use(self) -> bool:
        return self.references > 0 or self.active > 0

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent
