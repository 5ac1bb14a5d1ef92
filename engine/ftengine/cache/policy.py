"""What the prefix tree forgets first, and which recurrent states it keeps: the hook for richer caches.

`LruPolicy` is the plain one. Another policy may keep anchors longer, or copy to a slower tier before eviction.
"""

from __future__ import annotations

from typing import Protocol

from ftengine.cache.node import Node, Snapshot


class CachePolicy(Protocol):
    def page_rank(self, node: Node) -> float:
        """Of the pages that may go, the one with the lowest rank goes first. Must not change while it may go."""
        ...

    def snapshot_rank(self, snapshot: Snapshot) -> tuple[float, float]:
        """Of all snapshots, the one with the lowest rank goes first."""
        ...

    def wants_snapshot(self, tokens: int, previous: int, end: int) -> bool:
        """Whether prefill, having reached `tokens`, should keep the state there.

        previous: tokens at the last snapshot on this path (0: none)
        end: tokens at the last page boundary of the prompt
        """
        ...

    def evicting_page(self, node: Node) -> None:
        """Called just before the node is given up; its page and its snapshot, if any, still hold their content."""
        ...

    def evicting_snapshot(self, node: Node) -> None:
        """Called just before the node's snapshot alone is given up."""
        ...


class LruPolicy:
    """Least recently used first; a state in the middle of a prompt goes before one at its end."""

    def __init__(self, spacing: int = 1024) -> None:
        """spacing: tokens between two snapshots inside one prompt."""
        self.spacing = spacing

    def page_rank(self, node: Node) -> float:
        return node.last_used

    def snapshot_rank(self, snapshot: Snapshot) -> tuple[float, float]:
        return (float(snapshot.lasting), snapshot.last_used)

    def wants_snapshot(self, tokens: int, previous: int, end: int) -> bool:
        return tokens == end or tokens - previous >= self.spacing

    def evicting_page(self, node: Node) -> None:
        pass

    def evicting_snapshot(self, node: Node) -> None:
        pass
