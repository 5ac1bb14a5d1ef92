"""A prefix tree over token ids: one node a page, so that a path from the root spells a cached prefix.

It decides what is found and what may go; pages and slots are numbers to it. Whoever uses a path counts at its deepest
node only, and a node knows how many of its children are in use: so a parent is in use whenever a child is, and to move
along a path costs nothing for what lies behind.
"""

from __future__ import annotations

from ftengine.cache.node import NEVER, Anchor, Node, Use
from ftengine.cache.policy import CachePolicy
from ftengine.cache.tiers.base import TOKEN_BYTES


class PrefixTree:
    def __init__(self, page_size: int, policy: CachePolicy) -> None:
        self.page_size = page_size
        self.policy = policy
        self.root = Node(tokens=b"", page=-1, depth=0, parent=None)
        self.limbo = Node(tokens=b"", page=-1, depth=0, parent=None)  # what is forgotten as soon as copies let go
        self.size = 0  # nodes
        self.used = 0  # nodes in use
        self.anchors: set[Anchor] = set()
        self._leaves: set[Node] = set()  # that may go
        self._page_bytes = page_size * TOKEN_BYTES

    @property
    def evictable(self) -> int:
        """Pages that could be had by evicting."""
        return self.size - self.used

    def match(self, tokens: bytes, limit: int) -> list[Node]:
        """The nodes of the longest path that spells a prefix of the first `limit` tokens, the root left out."""
        step, path = self._page_bytes, []
        children = self.root.children
        for start in range(0, limit * TOKEN_BYTES - step + 1, step):
            child = children.get(tokens[start : start + step])
            if child is None:
                break
            path.append(child)
            children = child.children
        return path

    def deepest_anchor(self, path: list[Node], tokens: bytes, limit: int) -> Anchor | None:
        """The last anchor on a matched path, tails included, with at most `limit` tokens before it."""
        for node in (*path[::-1], self.root):
            if node.anchors:
                start = node.depth * self._page_bytes
                rest = tokens[start : min(start + self._page_bytes, limit * TOKEN_BYTES)]
                fitting = [anchor for tail, anchor in node.anchors.items() if rest.startswith(tail)]
                if fitting:
                    return max(fitting, key=_position)
        return None

    def anchors_ahead(self, node: Node, tokens: bytes, end: int) -> set[int]:
        """Positions behind `node` and up to `end` at which the path of `tokens` has anchors already."""
        found: set[int] = set()
        while True:
            start = node.depth * self._page_bytes
            rest = tokens[start : start + self._page_bytes]
            found.update(anchor.position for tail, anchor in node.anchors.items() if rest.startswith(tail))
            child = node.children.get(rest)
            if child is None or start > end * TOKEN_BYTES:
                return found
            node = child

    def acquire(self, node: Node) -> None:
        """A sequence or a copy starts to use the path to `node`."""
        idle = not node.in_use
        node.references += 1
        while idle and node.parent is not None:
            self.used += 1
            self._leaves.discard(node)
            node = node.parent
            idle = not node.in_use
            node.active += 1

    def release(self, node: Node, use: Use = NEVER) -> None:
        """What used the path to `node` is gone. use: who that was; copies leave no trace."""
        node.references -= 1
        self._rest(node, use)

    def extend(self, node: Node, tokens: bytes, page: int) -> Node:
        """Who uses `node` moves to the child for these tokens: a new one, which owns `page`, or one found."""
        child = node.children.get(tokens)
        if child is None:
            child = node.children[tokens] = Node(tokens, page, node.depth + 1, node)
            self.size += 1
        self.acquire(child)
        self.release(node)
        return child

    def put_anchor(self, anchor: Anchor) -> None:
        anchor.node.anchors[anchor.tail] = anchor
        self.anchors.add(anchor)

    def take_anchor(self, anchor: Anchor) -> int:
        """Removes it and returns its slot."""
        self.hide_anchor(anchor)
        self.anchors.discard(anchor)
        slot, anchor.slot = anchor.slot, -1
        return slot

    def hide_anchor(self, anchor: Anchor) -> None:
        """Nothing finds it any more."""
        if anchor.node.anchors.get(anchor.tail) is anchor:
            del anchor.node.anchors[anchor.tail]

    def first_leaf(self) -> Node | None:
        """The leaf that the policy gives up first."""
        return min(self._leaves, key=self.policy.page_rank, default=None)

    def remove(self, node: Node) -> None:
        """Takes a leaf that is not in use out of the tree."""
        parent = node.parent
        assert parent is not None
        assert not node.in_use
        assert not node.children
        assert not node.anchors
        del parent.children[node.tokens]
        node.parent = None
        self._leaves.discard(node)
        self.size -= 1
        self._consider(parent)

    def detach(self, node: Node) -> None:
        """Nothing finds it, nor what is below it, any more; who uses it may go on until it lets go."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        node.tokens, node.parent = node.page.to_bytes(8, "little"), self.limbo
        self.limbo.children[node.tokens] = node
        if node.in_use:
            self.limbo.active += 1
            parent.active -= 1
            self._rest(parent, NEVER)
        self._consider(parent)

    def nodes(self) -> list[Node]:
        """Every node but the root, children before parents."""
        return [node for top in (self.limbo, self.root) for node in leaves_first(top)[:-1]]

    def leaves(self) -> set[Node]:
        """Those that may go."""
        return self._leaves

    def _rest(self, node: Node, use: Use) -> None:
        """Passes on that `node` is not in use, if so."""
        while node.parent is not None and not node.in_use:
            self.used -= 1
            if use is not NEVER:
                node.use = use
            self._consider(node)
            node = node.parent
            node.active -= 1

    def _consider(self, node: Node) -> None:
        if node.parent is not None and not node.in_use and not node.children:
            self._leaves.add(node)


def leaves_first(node: Node) -> list[Node]:
    """`node` and everything below it, children before parents."""
    order = [node]
    for step in order:
        order.extend(step.children.values())
    return order[::-1]


def _position(anchor: Anchor) -> int:
    return anchor.position
