"""The prefix tree against a plain list of remembered prefixes."""

from __future__ import annotations

import random

from ftengine.cache.node import Node
from ftengine.cache.policy import LruPolicy
from ftengine.cache.tree import PrefixTree

PAGE = 2


def grow(tree: PrefixTree, tokens: list[int], pages: list[int]) -> Node:
    """Puts a path into the tree, referenced once."""
    node = tree.root
    for index, page in enumerate(pages):
        node = tree.extend(node, tuple(tokens[index * PAGE : (index + 1) * PAGE]), page)
    return node


def remember(tree: PrefixTree, tokens: list[int], first_page: int = 0) -> Node:
    node = grow(tree, tokens, list(range(first_page, first_page + len(tokens) // PAGE)))
    tree.release(node)
    return node


def test_match_is_the_longest_remembered_prefix_in_whole_pages() -> None:
    choose, tree, known = random.Random(2), PrefixTree(PAGE), []
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
        assert tree.match(tokens, min(limit, len(tokens))).depth == longest
        remember(tree, tokens)
        known.append(tokens)


def test_a_known_page_is_shared_and_a_new_one_belongs_to_the_tree() -> None:
    tree = PrefixTree(PAGE)
    first = grow(tree, [1, 2, 3, 4], [10, 11])
    second = grow(tree, [1, 2, 5, 6], [20, 21])
    assert [node.page for node in second.path()] == [21, 10]
    assert (tree.size, tree.referenced) == (3, 3)
    tree.release(first)
    assert (tree.size, tree.referenced, tree.evictable) == (3, 2, 1)
    assert second.parent is not None
    assert second.parent.references == 1


def test_least_recently_used_leaf_goes_first_and_referenced_never() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, [1, 1, 2, 2], 0)
    remember(tree, [3, 3], 10)
    kept = grow(tree, [4, 4, 5, 5], [20, 21])
    touched = tree.match([1, 1, 2, 2], 4)
    tree.acquire(touched)
    tree.release(touched)
    gone = []
    while (node := tree.pop_leaf()) is not None:
        gone.append(node.page)
    assert gone == [10, 1, 0]
    assert (tree.size, tree.evictable) == (2, 0)
    tree.release(kept)
    assert [tree.pop_leaf().page for _ in range(2)] == [21, 20]  # type: ignore[union-attr]
    assert tree.pop_leaf() is None
    assert tree.evictions == 5


def test_every_evictable_page_can_be_had_after_any_history() -> None:
    choose, tree = random.Random(3), PrefixTree(PAGE)
    running: list[Node] = []
    for page in range(3000):
        action = choose.random()
        if action < 0.4:
            tokens = [choose.randrange(3) for _ in range(8)]
            node = tree.match(tokens, choose.randrange(9))
            tree.acquire(node)
            running.append(tree.extend(node, (choose.randrange(3), choose.randrange(3)), page))
        elif action < 0.75 and running:
            tree.release(running.pop(choose.randrange(len(running))))
        elif action < 0.9:
            expected = tree.evictable > 0
            assert (tree.pop_leaf() is not None) == expected
        assert len(tree._candidates) <= 2 * tree.size + 66
    for node in running:
        tree.release(node)
    assert tree.referenced == 0
    remaining = tree.size
    assert [tree.pop_leaf() is not None for _ in range(remaining)] == [True] * remaining
    assert tree.size == 0


def test_another_policy_decides_what_goes_and_is_told() -> None:
    told: list[int] = []

    class NewestFirst(LruPolicy):
        def page_rank(self, node: Node) -> float:
            return -node.last_used

        def evicting_page(self, node: Node) -> None:
            told.append(node.page)

    tree = PrefixTree(PAGE, NewestFirst())
    for index in range(3):
        remember(tree, [index, index], 10 * index)
    while tree.pop_leaf():
        pass
    assert told == [20, 10, 0]


def test_middle_snapshots_go_before_those_at_ends() -> None:
    tree = PrefixTree(PAGE)
    end = remember(tree, [1, 1])
    middle = remember(tree, [2, 2], 5)
    tree.keep_snapshot(end, slot=0, lasting=True)
    tree.keep_snapshot(middle, slot=1, lasting=False)
    assert tree.oldest_snapshot() is middle
    assert tree.take_snapshot(middle) == 1
    assert tree.oldest_snapshot() is end
    assert tree.take_snapshot(end) == 0
    assert tree.oldest_snapshot() is None
