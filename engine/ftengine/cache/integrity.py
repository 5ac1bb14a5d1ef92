"""Whether the books of pages, slots, anchors and references agree with each other."""

from __future__ import annotations

from collections import Counter

from ftengine.cache.keeper import Keeper
from ftengine.cache.node import Node
from ftengine.cache.place import Place
from ftengine.cache.store import DeviceStore
from ftengine.cache.tiers.base import TOKEN_BYTES
from ftengine.core import Sequence

Places = dict[Sequence, Place]


def check_idle(store: DeviceStore, keeper: Keeper, places: Places, ended: list[Sequence]) -> None:
    """With nothing running, copies aside. Counts only, so that a full cache takes no longer than an empty one."""
    tree = store.tree
    assert set(places) == set(ended), "a sequence that does not run holds a place in the tree"
    own = sum(len(sequence.pages) - place.node.depth for sequence, place in places.items())
    assert store.pages.used_count == tree.size + own, "a page is leaked"
    running = sum(sequence.state_slot >= 0 for sequence in places)
    assert store.slots.used_count == len(tree.anchors) + running, "a state slot is leaked"
    held = sum(anchor.holds for anchor in tree.anchors)
    assert held == sum(anchor is not None for _, anchor in keeper.held()), "an anchor is held by nobody"
    if not keeper.under_way and not places:
        assert not tree.used, "a reference is leaked"
        assert not tree.limbo.children, "what was forgotten is still there"


def check(store: DeviceStore, keeper: Keeper, places: Places, running: list[Sequence]) -> None:
    """Everything, node by node. running: all that hold a place."""
    assert set(places) == set(running), "a sequence that does not run holds a place in the tree"
    assert len(running) == len(set(running)), "a sequence runs twice"
    nodes = store.tree.nodes()
    _check_paths(store, keeper, places, nodes)
    _check_pages(store, places, nodes)
    _check_slots(store, keeper, places, nodes)


def _check_paths(store: DeviceStore, keeper: Keeper, places: Places, nodes: list[Node]) -> None:
    tree = store.tree
    references = Counter(place.node for place in places.values())
    references += Counter(node for node, _ in keeper.held())
    used = {step for node in references for step in node.path()}
    for node in nodes:
        parent = node.parent
        assert parent is not None, "a node in the tree has no parent"
        assert parent.children[node.tokens] is node, "a node is not its parent's child"
        assert node.references == references[node], "a reference is leaked"
        assert node.active == sum(child.in_use for child in node.children.values()), "a path is wrongly in use"
        assert node.in_use == (node in used), "a path is wrongly in use"
    assert tree.size == len(nodes), "the tree's size is wrong"
    assert tree.used == len(used), "the count of nodes in use is wrong"
    assert tree.leaves() == {node for node in nodes if not node.in_use and not node.children}, "a leaf is lost"
    for node in tree.limbo.children.values():
        assert node.in_use, "what was forgotten is still there"


def _check_pages(store: DeviceStore, places: Places, nodes: list[Node]) -> None:
    owned: list[int] = []
    for sequence, place in places.items():
        node = place.node
        path = [step.page for step in node.path()][::-1]
        assert sequence.pages[: node.depth] == path, "a sequence's pages are not its path's"
        owned += sequence.pages[node.depth :]
    used = [node.page for node in nodes] + owned
    assert len(used) == len(set(used)), "a page has two owners"
    assert set(used) == store.pages.in_use(), "a page is leaked"


def _check_slots(store: DeviceStore, keeper: Keeper, places: Places, nodes: list[Node]) -> None:
    tree, page_bytes = store.tree, store.tree.page_size * TOKEN_BYTES
    found = {anchor for node in (*nodes, tree.root) for anchor in node.anchors.values()}
    hidden = tree.anchors - found
    assert found <= tree.anchors, "an anchor is lost"
    assert all(anchor.holds for anchor in hidden), "an anchor that nothing finds is still there"
    holds = Counter(anchor for _, anchor in keeper.held() if anchor is not None)
    for anchor in tree.anchors:
        assert anchor.holds == holds[anchor], "an anchor is held by nobody"
        assert len(anchor.tail) < page_bytes, "a tail is longer than a page"
        expected = (anchor.node.depth * page_bytes + len(anchor.tail)) // TOKEN_BYTES
        assert anchor.position == expected, "an anchor is not where it says"
    slots = [anchor.slot for anchor in tree.anchors]
    slots += [planned.slot for place in places.values() for planned in place.planned]
    slots += [sequence.state_slot for sequence in places if sequence.state_slot >= 0]
    assert len(slots) == len(set(slots)), "a state slot has two owners"
    assert set(slots) == store.slots.in_use(), "a state slot is leaked"
    for node in nodes:
        leaf = not node.in_use and not node.children
        assert not store.recurrent or not leaf or node.anchors, "a page is kept that no state leads on from"
