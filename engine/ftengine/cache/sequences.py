"""Pages and recurrent states of running sequences, and what they leave to the prefix tree.

Every full page a running sequence has computed is in the tree, referenced by it; so sequences with a common prefix
share pages while they run, and at the end pages only lose a reference. The last, partly filled page and the pages
reserved ahead are the sequence's own.

For models with recurrent state a prefix is usable only where a snapshot of the state was kept: at page boundaries in
the prompt, at its last one, and at the last one that decoding passed (one snapshot that moves along).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftengine.cache.node import Node
from ftengine.cache.pages import Allocator
from ftengine.cache.policy import CachePolicy
from ftengine.cache.tree import PrefixTree
from ftengine.core import CacheTensors, Sequence

if TYPE_CHECKING:
    import torch


class SequenceCache:
    def __init__(self, tensors: CacheTensors, pages: int, slots: int, policy: CachePolicy | None = None) -> None:
        """slots: running states and snapshots together; ignored for models without recurrent state."""
        self.tensors = tensors
        self.page_size = tensors.page_size
        self.has_state = bool(tensors.states)
        self.pages = Allocator(pages)
        self.slots = Allocator(slots if self.has_state else 0)
        self.tree = PrefixTree(tensors.page_size, policy)
        self.snapshot_evictions = 0
        self._deepest: dict[Sequence, Node] = {}  # where each running sequence is in the tree
        self._moving: dict[Sequence, Node] = {}  # where its decode snapshot is

    @property
    def available(self) -> int:
        """Pages free now or to be had by forgetting cached prefixes."""
        return self.pages.free_count + self.tree.evictable

    @property
    def pages_running(self) -> int:
        """Pages that running sequences use."""
        return self.pages.used_count - self.tree.evictable

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def admit(self, sequence: Sequence, headroom: int = 0) -> bool:
        """Gives a waiting sequence its cached prefix, pages for all its tokens and a state slot.

        Sets pages, state_slot and computed. At least one token stays to be computed, for its logits.
        headroom: pages that must still be available afterwards. Returns False, with nothing changed, if they are not.
        """
        node = self._match(sequence.tokens)
        self.tree.acquire(node)
        missing = self.pages_for(len(sequence.tokens)) - node.depth
        if missing + headroom > self.available:
            self.tree.release(node)
            return False
        self._deepest[sequence] = node
        if self.has_state:
            sequence.state_slot = self._running_slot(node)
        sequence.pages = [step.page for step in node.path()][::-1]
        sequence.computed = node.depth * self.page_size
        reserved = self.reserve(sequence, len(sequence.tokens))
        assert reserved
        return True

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Makes sure that pages for the first `tokens` tokens are there; False if they cannot be had."""
        missing = self.pages_for(tokens) - len(sequence.pages)
        if missing > self.available:
            return False
        sequence.pages += [self._allocate_page() for _ in range(missing)]
        return True

    def commit(self, sequence: Sequence) -> None:
        """After a step: full pages go to the tree, and the state is kept where it may be wanted again.

        To be called before the sampled token is appended.
        """
        node = self._deepest[sequence]
        while (node.depth + 1) * self.page_size <= sequence.computed:
            start = node.depth * self.page_size
            own = sequence.pages[node.depth]
            node = self.tree.extend(node, tuple(sequence.tokens[start : start + self.page_size]), own)
            if node.page != own:  # another sequence computed the same page first: use that one
                sequence.pages[node.depth - 1] = node.page
                self.pages.free(own)
        self._deepest[sequence] = node
        if self.has_state and sequence.computed and sequence.computed == node.depth * self.page_size:
            self._keep_state(sequence, node)

    def last_boundary(self, tokens: int) -> int:
        """The last page boundary before the last of `tokens` tokens, where prefill must stop to keep the state."""
        return (tokens - 1) // self.page_size * self.page_size if self.has_state else 0

    def release(self, sequence: Sequence, *, keep: bool = True, halfway: bool = False) -> None:
        """The sequence stops running: what it computed stays in the tree without a reference, the rest is free.

        keep: False if its numbers are not to be trusted; its path is then forgotten as far as nothing else runs on it.
        halfway: a step stopped in its middle; its state is then of some tokens in some layers, of others in others.
        """
        node = self._deepest.pop(sequence)
        moving = self._moving.pop(sequence, None)
        if moving is not None and moving.snapshot is not None:
            moving.snapshot.lasting = True
        for page in sequence.pages[node.depth :]:
            if not keep:
                self._erase(page)
            self.pages.free(page)
        if self.has_state:
            self._release_state(sequence, node, keep=keep, halfway=halfway)
        sequence.pages, sequence.state_slot, sequence.computed = [], -1, 0
        self.tree.release(node)
        if not keep:
            self._forget(node)
        elif self.has_state:
            self._prune(node)

    def clear(self) -> None:
        """Forgets every cached prefix that no running sequence uses."""
        while self._evict_page():
            pass

    def check_idle(self) -> None:
        """With nothing running: raises AssertionError if a count shows a leak; as quick for a full cache."""
        assert not self._deepest, "a sequence that does not run holds a place in the tree"
        assert not self._moving, "a sequence that does not run holds a snapshot"
        assert not self.tree.referenced, "a reference is leaked"
        assert self.pages.used_count == self.tree.size, "a page is leaked"
        assert self.slots.used_count == len(self.tree.snapshots), "a state slot is leaked"

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raises AssertionError if a page, slot or reference is leaked, shared wrongly or counted wrongly."""
        nodes = self.tree.nodes()
        references: dict[Node, int] = {}
        owned: list[int] = []
        assert set(self._deepest) == set(running), "a sequence that does not run holds a place in the tree"
        assert set(self._moving) <= set(running), "a sequence that does not run holds a snapshot"
        for sequence in running:
            node = self._deepest[sequence]
            path = list(node.path())[::-1]
            assert sequence.pages[: node.depth] == [step.page for step in path], "a sequence's pages are not its path's"
            for step in path:
                references[step] = references.get(step, 0) + 1
            owned += sequence.pages[node.depth :]
        for node in nodes:
            assert node.references == references.get(node, 0), "a reference is leaked"
            assert node.parent is not None, "a node in the tree has no parent"
            assert node.parent.children[node.tokens] is node, "a node is not its parent's child"
        used = [node.page for node in nodes] + owned
        assert len(used) == len(set(used)), "a page has two owners"
        assert set(used) == self.pages.in_use(), "a page is leaked"
        assert self.tree.size == len(nodes), "the tree's size is wrong"
        assert self.tree.referenced == len(references), "the count of referenced nodes is wrong"
        snapshots = {node for node in nodes if node.snapshot is not None}
        assert self.tree.snapshots == snapshots, "a snapshot is lost"
        slots = [node.snapshot.slot for node in snapshots if node.snapshot is not None]
        slots += [sequence.state_slot for sequence in running if sequence.state_slot >= 0]
        assert len(slots) == len(set(slots)), "a state slot has two owners"
        assert set(slots) == self.slots.in_use(), "a state slot is leaked"

    def _match(self, tokens: list[int]) -> Node:
        node = self.tree.match(tokens, len(tokens) - 1)
        while self.has_state and node.snapshot is None and node.parent is not None:
            node = node.parent
        return node

    def _running_slot(self, node: Node) -> int:
        """A slot for a sequence that starts at `node`, holding the state there. The root's is zeroed by the model."""
        snapshot = node.snapshot
        if snapshot is not None:
            snapshot.lasting = True
        slot = self._free_slot()
        assert slot is not None, "more sequences run than there are state slots"
        if snapshot is not None:
            # If this very snapshot had to make way, its slot is the one that became free: the state is in place.
            self._copy_state(snapshot.slot, slot)
        return slot

    def _release_state(self, sequence: Sequence, node: Node, *, keep: bool, halfway: bool) -> None:
        at_node = sequence.computed == node.depth * self.page_size > 0
        if keep and not halfway and at_node and node.snapshot is None:
            self.tree.keep_snapshot(node, sequence.state_slot, lasting=True)  # the slot changes hands
            return
        if not keep:
            self._erase_state(sequence.state_slot)
        self.slots.free(sequence.state_slot)

    def _keep_state(self, sequence: Sequence, node: Node) -> None:
        """Keeps the state after `node`, which the sequence has just reached."""
        if sequence.computed == len(sequence.tokens):
            self._keep_moving(sequence, node)
        elif node.snapshot is None:
            previous = next((step.depth for step in node.path() if step.snapshot is not None), 0) * self.page_size
            end = self.last_boundary(len(sequence.tokens))
            if self.tree.policy.wants_snapshot(sequence.computed, previous, end):
                self._take_snapshot(sequence, node, self._free_slot(), lasting=sequence.computed == end)

    def _keep_moving(self, sequence: Sequence, node: Node) -> None:
        previous = self._moving.pop(sequence, None)
        self._moving[sequence] = node
        if node.snapshot is None:
            if previous is not None and previous.snapshot is not None and not previous.snapshot.lasting:
                slot: int | None = self.tree.take_snapshot(previous)
            else:
                slot = self._free_slot()
            self._take_snapshot(sequence, node, slot, lasting=False)

    def _take_snapshot(self, sequence: Sequence, node: Node, slot: int | None, *, lasting: bool) -> None:
        if slot is not None:
            self._copy_state(sequence.state_slot, slot)
            self.tree.keep_snapshot(node, slot, lasting=lasting)

    def _free_slot(self) -> int | None:
        """A slot, by giving up a snapshot if need be; None if running sequences hold them all."""
        if not self.slots.free_count:
            self._evict_snapshot()
        return self.slots.allocate() if self.slots.free_count else None

    def _allocate_page(self) -> int:
        if not self.pages.free_count:
            evicted = self._evict_page()
            assert evicted
        return self.pages.allocate()

    def _evict_page(self) -> bool:
        node = self.tree.pop_leaf()
        if node is None:
            return False
        self._give_up(node)
        return True

    def _evict_snapshot(self) -> None:
        node = self.tree.oldest_snapshot()
        if node is not None:
            self.tree.policy.evicting_snapshot(node)
            self.slots.free(self.tree.take_snapshot(node))
            self.snapshot_evictions += 1
            self._prune(node)

    def _prune(self, node: Node) -> None:
        """Pages below the last snapshot of a branch can never be matched: give them up at once."""
        while node.parent is not None and node.snapshot is None and not node.references and not node.children:
            parent = node.parent
            self.tree.remove(node)
            self._give_up(node)
            node = parent

    def _forget(self, node: Node) -> None:
        """Gives up and erases the path to `node`, with every branch from it, as far up as nothing running uses it."""
        doomed = [step for step in node.path() if not step.references]
        if doomed:
            for step in self.tree.leaves_first(doomed[-1]):
                self.tree.remove(step)
                self._erase(step.page)
                self._give_up(step)

    def _give_up(self, node: Node) -> None:
        if node.snapshot is not None:
            self.slots.free(self.tree.take_snapshot(node))
        self.pages.free(node.page)

    def _erase(self, page: int) -> None:
        """NaN left in a page would enter a later sequence's attention through `0 * NaN`."""
        for layer in (*self.tensors.keys, *self.tensors.values):
            layer[page].zero_()

    def _erase_state(self, slot: int) -> None:
        for state in self._states(slot):
            state.zero_()

    def _copy_state(self, source: int, target: int) -> None:
        for old, new in zip(self._states(source), self._states(target), strict=True):
            new.copy_(old)

    def _states(self, slot: int) -> list[torch.Tensor]:
        """Views of one slot's states; as few as can be, since on a device each costs a launch."""
        if self.tensors.joined:
            return [tensor[:, slot] for tensor in self.tensors.joined]
        return [tensor[slot] for layer in self.tensors.states for tensor in layer.values()]
