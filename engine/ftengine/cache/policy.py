"""What the prefix tree gives up first. `ValuePolicy` is the rule of cache/value.py, for pages and for anchors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ftengine.cache.node import Anchor, Node
from ftengine.cache.sessions import Sessions
from ftengine.cache.tiers.base import TOKEN_BYTES
from ftengine.cache.value import Worth, rank
from ftengine.core import BoundaryKind

COPIED = 0.1  # of its value that an anchor keeps once a lower tier has a copy: restoring it costs that much


class CachePolicy(Protocol):
    def page_rank(self, node: Node) -> tuple[int, float]:
        """Of the leaves that may go, the one with the lowest rank goes first."""
        ...

    def anchor_rank(self, anchor: Anchor) -> tuple[int, float]:
        """Of the anchors that may go, the one with the lowest rank goes first."""
        ...

    def worth_rank(self, worth: Worth) -> tuple[int, float]:
        """Of an anchor that is yet to be made."""
        ...


class ValuePolicy:
    """page_bytes: of a page's keys and values. recurrent: pages are of use only as far as a state leads on."""

    def __init__(
        self,
        sessions: Sessions,
        page_size: int,
        page_bytes: int,
        *,
        recurrent: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sessions = sessions
        self.clock = clock
        self.recurrent = recurrent
        self._page_size = page_size
        self._page_bytes = page_bytes

    def page_rank(self, node: Node) -> tuple[int, float]:
        if self.recurrent and node.anchors:
            return max(self.anchor_rank(anchor) for anchor in node.anchors.values())
        use, position = node.use, node.depth * self._page_size
        worth = Worth(
            BoundaryKind.ANSWER_END,  # a leaf is where a path ends
            use.session,
            use.side,
            use.when,
            saved=self._page_size,
            bytes=self._page_bytes,
            position=position,
            turn=use.turn,
        )
        return self.worth_rank(worth)

    def anchor_rank(self, anchor: Anchor) -> tuple[int, float]:
        anchor.worth.saved = anchor.gap() if self.recurrent else len(anchor.tail) // TOKEN_BYTES
        group, value = self.worth_rank(anchor.worth)
        return group, value * COPIED if anchor.below else value

    def worth_rank(self, worth: Worth) -> tuple[int, float]:
        return rank(worth, self.sessions, self.clock())
