"""A prefix tree over token ids: one node a page, so that a path from the root spells a cached prefix.

It decides what is remembered and what may go; pages and slots are numbers to it. A node's `references` counts the
running sequences whose path goes through it, so a parent is referenced whenever a child is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from ftengine.cache.node import Node, Snapshot
from ftengine.cache.policy import CachePolicy, LruPolicy


class PrefixTree:
    def __init__(self, page_size: int, policy: CachePolicy | None = None) -> None:
        self.page_size = page_size
        self.policy = policy or LruPolicy()
        self.root = Node(tokens=(), page=-1, depth=0, parent=None)
        self.size = 0  # nodes
        self.referenced = 0  # nodes that a running sequence uses
        self.evictions = 0
        self.snapshots: set[Node] = set()
        self._clock = itertools.count(1)
        self._candidates: list[tuple[float, int, Node]] = []  # heap of leaves; outdated entries are skipped

    @property
    def evictable(self) -> int:
        """Pages that could be had by evicting."""
        return self.size - self.referenced

    def match(self, tokens: Sequence[int], limit: int) -> Node:
        """The deepest node whose path spells a prefix of tokens[:limit]; the root if there is none."""
        node = self.root
        for end in range(self.page_size, limit + 1, self.page_size):
            child = node.children.get(tuple(tokens[end - self.page_size : end]))
            if child is None:
                break
            node = child
        return node

    def acquire(self, node: Node) -> None:
        """A sequence starts to use the path to `node`."""
        now = next(self._clock)
        for step in node.path():
            self.referenced += step.references == 0
            step.references += 1
            step.last_used = now
        if node.snapshot is not None:
            node.snapshot.last_used = now

    def release(self, node: Node) -> None:
        """The sequence that used the path to `node` is gone."""
        now = next(self._clock)
        for step in node.path():
            step.references -= 1
            self.referenced -= step.references == 0
            step.last_used = now
        self._consider(node)

    def extend(self, node: Node, tokens: tuple[int, ...], page: int) -> Node:
        """The sequence at `node` moves to the child for these tokens: a new one, which owns `page`, or one found."""
        child = node.children.get(tokens)
        if child is None:
            child = Node(tokens, page, node.depth + 1, node)
            node.children[tokens] = child
            self.size += 1
        self.referenced += child.references == 0
        child.references += 1
        child.last_used = next(self._clock)
        return child

    def keep_snapshot(self, node: Node, slot: int, *, lasting: bool) -> None:
        node.snapshot = Snapshot(slot, lasting, next(self._clock))
        self.snapshots.add(node)

    def take_snapshot(self, node: Node) -> int:
        """Removes the node's snapshot and returns its slot."""
        assert node.snapshot is not None
        slot = node.snapshot.slot
        node.snapshot = None
        self.snapshots.discard(node)
        return slot

    def oldest_snapshot(self) -> Node | None:
        """The node whose snapshot the policy would give up first."""

        def rank(node: Node) -> tuple[float, float]:
            assert node.snapshot is not None
            return self.policy.snapshot_rank(node.snapshot)

        return min(self.snapshots, key=rank, default=None)

    def pop_leaf(self) -> Node | None:
        """Removes the unreferenced leaf that the policy gives up first; its page and snapshot are now the caller's."""
        while self._candidates:
            rank, _, node = heapq.heappop(self._candidates)
            if self._may_go(node) and rank == self.policy.page_rank(node):
                self.remove(node)
                return node
        return None

    def remove(self, node: Node) -> None:
        """Takes an unreferenced leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        assert not node.references
        assert not node.children
        self.policy.evicting_page(node)
        del parent.children[node.tokens]
        node.parent = None
        self.size -= 1
        self.evictions += 1
        self._consider(parent)

    def nodes(self) -> list[Node]:
        """Every node but the root, children before parents."""
        return self.leaves_first(self.root)[:-1]

    def leaves_first(self, node: Node) -> list[Node]:
        """`node` and everything below it, children before parents."""
        order = [node]
        for step in order:
            order.extend(step.children.values())
        return order[::-1]

    def _may_go(self, node: Node) -> bool:
        return node.parent is not None and not node.references and not node.children

    def _consider(self, node: Node) -> None:
        if not self._may_go(node):
            return
        if len(self._candidates) > 2 * self.size + 64:
            fresh = {id(entry): entry for _, _, entry in self._candidates if self._may_go(entry)}
            self._candidates = [(self.policy.page_rank(leaf), next(self._clock), leaf) for leaf in fresh.values()]
            heapq.heapify(self._candidates)
        heapq.heappush(self._candidates, (self.policy.page_rank(node), next(self._clock), node))
