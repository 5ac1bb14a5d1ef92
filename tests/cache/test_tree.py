"""The prefix tree against a plain list of remembered prefixes."""

from __future__ import annotations

import random
import time

from ftengine.cache.node import Anchor, Node
from ftengine.cache.place import packed
from ftengine.cache.policy import ValuePolicy
from ftengine.cache.sessions import Sessions
from ftengine.cache.tree import PrefixTree
from ftengine.cache.value import Worth
from ftengine.core import BoundaryKind

PAGE = 2


class Ordered(ValuePolicy):
    """A page's number says when it goes."""

    def page_rank(self, node: Node) -> tuple[int, float]:
        return (0, node.page)


def make_tree(page_size: int = PAGE) -> PrefixTree:
    return PrefixTree(page_size, Ordered(Sessions(), page_size, 1, recurrent=False))


def grow(tree: PrefixTree, tokens: list[int], pages: list[int]) -> Node:
    """Puts a path into the tree, referenced once."""
    node = tree.root
    tree.acquire(node)
    for index, page in enumerate(pages):
        node = tree.extend(node, packed(tokens[index * PAGE : (index + 1) * PAGE]), page)
    return node


def remember(tree: PrefixTree, tokens: list[int], first_page: int = 0) -> Node:
    node = grow(tree, tokens, list(range(first_page, first_page + len(tokens) // PAGE)))
    tree.release(node)
    return node


def anchor_at(tree: PrefixTree, node: Node, tail: list[int], slot: int) -> Anchor:
    position = node.depth * PAGE + len(tail)
    made = Anchor(node, packed(tail), slot, Worth(BoundaryKind.MESSAGE, "", False, 0.0, position=position))
    tree.put_anchor(made)
    return made


def test_match_is_the_longest_remembered_prefix_in_whole_pages() -> None:
    choose, tree, known = random.Random(2), make_tree(), []
    for _ in range(60):
        tokens = [choose.randrange(2) for _ in range(choose.randrange(0, 14))]
        limit = choose.randrange(0, 14)
        longest = 0
        for old in known:
            pages = 0
            while (pages + 1) * PAGE <= min(len(tokens), len(old) // PAGE * PAGE, limit):
                if tokens[pages * PAGE : (pages + 1) * PAGE] != old[pages * PAGE : (pages + 1) * PAGE]:
                    break
                pages += 1
            longest = max(longest, pages)
        found = tree.match(packed(tokens), min(limit, len(tokens)))
        assert len(found) == longest
        assert [node.depth for node in found] == list(range(1, longest + 1))
        remember(tree, tokens)
        known.append(tokens)


def test_the_deepest_anchor_is_the_longest_kept_beginning() -> None:
    """Anchors with tails of every length at every node, against a comparison of lists."""
    choose, tree = random.Random(4), make_tree()
    kept: list[list[int]] = []
    for slot in range(200):
        tokens = [choose.randrange(2) for _ in range(choose.randrange(0, 14))]
        node = remember(tree, tokens)
        tail = tokens[node.depth * PAGE :]
        if packed(tail) not in node.anchors and tokens:
            anchor_at(tree, node, tail, slot)
            kept.append(tokens)
    for _ in range(300):
        tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 14))]
        limit = choose.randrange(0, len(tokens) + 1)
        expected = max((len(old) for old in kept if old == tokens[: len(old)] and len(old) <= limit), default=None)
        path = tree.match(packed(tokens), limit)
        found = tree.deepest_anchor(path, packed(tokens), limit)
        assert (None if found is None else found.position) == expected
        ahead = tree.anchors_ahead(tree.root, packed(tokens), len(tokens))
        assert ahead == {len(old) for old in kept if old == tokens[: len(old)]}


def test_a_known_page_is_shared_and_a_new_one_belongs_to_the_tree() -> None:
    tree = make_tree()
    first = grow(tree, [1, 2, 3, 4], [10, 11])
    second = grow(tree, [1, 2, 5, 6], [20, 21])
    assert [node.page for node in second.path()] == [21, 10]
    assert (tree.size, tree.used) == (3, 3)
    tree.release(first)
    assert (tree.size, tree.used, tree.evictable) == (3, 2, 1)
    assert second.parent is not None
    assert (second.parent.references, second.parent.active) == (0, 1)


def test_the_lowest_leaf_goes_first_and_one_in_use_never() -> None:
    tree = make_tree()
    remember(tree, [1, 1, 2, 2], 0)
    remember(tree, [1, 1, 3, 3], 10)
    kept = grow(tree, [4, 4, 5, 5], [20, 21])
    assert tree.size == 5
    gone = []
    while (leaf := tree.first_leaf()) is not None:
        gone.append(leaf.page)
        tree.remove(leaf)
    assert gone == [1, 11, 0]
    tree.release(kept)
    assert tree.first_leaf() is kept
    assert tree.size == 2


def test_use_is_counted_right_after_any_history() -> None:
    """References and nodes in use, against a walk over all paths; every page that may go can be had."""
    choose, tree = random.Random(3), make_tree()
    running: list[Node] = []
    for page in range(2000):
        action = choose.random()
        if action < 0.4:
            tokens = [choose.randrange(3) for _ in range(8)]
            path = tree.match(packed(tokens), choose.randrange(9))
            node = path[-1] if path else tree.root
            tree.acquire(node)
            running.append(tree.extend(node, packed([choose.randrange(3), choose.randrange(3)]), page))
        elif action < 0.75 and running:
            tree.release(running.pop(choose.randrange(len(running))))
        elif action < 0.9:
            leaf = tree.first_leaf()
            assert (leaf is not None) == (tree.evictable > 0)
            if leaf is not None:
                tree.remove(leaf)
        elif action < 0.91 and tree.size:
            doomed = choose.choice([node for node in tree.nodes() if node not in tree.limbo.children.values()])
            if all(doomed not in node.path() for node in running):
                tree.detach(doomed)
        used = {step for node in running for step in node.path()}
        nodes = tree.nodes()
        assert {node for node in nodes if node.in_use} == used
        assert (tree.size, tree.used) == (len(nodes), len(used))
        assert tree.leaves() == {node for node in nodes if not node.children and node not in used}
    for node in running:
        tree.release(node)
    assert tree.used == tree.root.active == tree.limbo.active == 0
    while (leaf := tree.first_leaf()) is not None:
        tree.remove(leaf)
    assert tree.size == 0


def test_what_was_detached_is_not_found_and_goes_when_it_is_let_go() -> None:
    tree = make_tree()
    reader = grow(tree, [1, 1, 2, 2, 3, 3], [0, 1, 2])
    tree.detach(tree.match(packed([1, 1, 2, 2]), 4)[1])
    assert [node.page for node in tree.match(packed([1, 1, 2, 2, 3, 3]), 6)] == [0]
    again = grow(tree, [1, 1, 2, 2], [5, 6])
    assert [node.page for node in again.path()] == [6, 0]
    assert tree.used == 4
    tree.release(again)
    assert tree.used == 2
    tree.release(reader)
    assert tree.used == 0
    assert {node.page for node in tree.leaves()} == {2, 6}


def test_a_long_prompt_is_looked_up_in_little_time() -> None:
    """60,000 tokens; the bar is 2 ms, here on a machine that does other things as well."""
    tree = PrefixTree(16, ValuePolicy(Sessions(), 16, 1, recurrent=True))
    tokens = packed([index * 7919 % 150_000 for index in range(60_000)])
    node = tree.root
    tree.acquire(node)
    for page in range(3750):
        node = tree.extend(node, tokens[page * 64 : (page + 1) * 64], page)
    tree.put_anchor(Anchor(tree.match(tokens, 20_000)[-1], b"", 0, Worth(BoundaryKind.SYSTEM, "", False, 0.0)))
    best = 1.0
    for _ in range(20):
        begun = time.perf_counter()
        path = tree.match(tokens, 59_999)
        assert tree.deepest_anchor(path, tokens, 59_999) is not None
        best = min(best, time.perf_counter() - begun)
    assert len(path) == 3749
    assert best < 0.002 * 5
