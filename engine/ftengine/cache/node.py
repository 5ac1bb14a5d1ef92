"""What the prefix tree consists of: nodes, each one page, some with a recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Snapshot:
    """A recurrent state as it was after the last token of a node."""

    slot: int
    lasting: bool  # at the end of a prompt or answer, or found by a later request
    last_used: int


@dataclass(eq=False)
class Node:
    """One full page. `tokens` are this page's ids; the root has none and no page."""

    tokens: tuple[int, ...]
    page: int
    depth: int  # pages from the root, this one included
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    references: int = 0
    snapshot: Snapshot | None = None
    last_used: int = 0

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent
