"""Pages, slots and the prefix tree of the device together: what is given out, what is kept, what makes way."""

from __future__ import annotations

from ftengine.cache.node import Anchor, Node
from ftengine.cache.pages import Allocator
from ftengine.cache.storage import Storage
from ftengine.cache.tiers.base import TOKEN_BYTES
from ftengine.cache.tree import PrefixTree, leaves_first

Rank = tuple[int, float]


class DeviceStore:
    """recurrent: the model has a state, and a path is of use only as far as an anchor has one."""

    def __init__(self, storage: Storage, tree: PrefixTree, pages: int, slots: int, *, recurrent: bool) -> None:
        self.storage = storage
        self.tree = tree
        self.recurrent = recurrent
        self.pages = Allocator(pages)
        self.slots = Allocator(slots)
        self.page_evictions = self.anchor_evictions = 0  # that made way for others

    @property
    def available(self) -> int:
        """Pages free now or to be had by forgetting cached prefixes."""
        return self.pages.free_count + self.tree.evictable

    def page(self) -> int:
        """One is available."""
        if not self.pages.free_count:
            before = self.tree.size
            evicted = self.evict_page()
            assert evicted
            self.page_evictions += before - self.tree.size
        return self.pages.allocate()

    def evict_page(self) -> bool:
        node = self.tree.first_leaf()
        if node is None:
            return False
        parent = node.parent
        self._remove(node)
        if parent is not None:
            self.prune(parent)
        return True

    def slot(self, rank: Rank | None = None) -> int | None:
        """A free one, or that of the anchor which goes first, if that ranks below `rank` (None: whatever its rank)."""
        if not self.slots.free_count:
            victim = self._victim()
            if victim is None or (rank is not None and self.tree.policy.anchor_rank(victim) >= rank):
                return None
            self._evict_anchor(victim)
        return self.slots.allocate()

    def slot_to_run(self, source: Anchor | None) -> int | None:
        """For a sequence that starts from `source`. If no other can be had it is the source's own, which is given up:
        state and companion are in place then."""
        if not self.slots.free_count:
            victim = self._victim(but=source)
            if victim is None:
                if source is None or source.holds:
                    return None
                self.anchor_evictions += 1
                return self.tree.take_anchor(source)
            self._evict_anchor(victim)
        return self.slots.allocate()

    def can_run(self) -> bool:
        """Whether `slot_to_run` has one."""
        return self.slots.free_count > 0 or self._victim() is not None

    def room(self, ranks: list[Rank]) -> int:
        """How many anchors of these ranks, best first, find slots without any of higher rank going."""
        rivals = sorted(self.tree.policy.anchor_rank(anchor) for anchor in self.tree.anchors if not anchor.holds)
        free = self.slots.free_count
        for count, rank in enumerate(ranks):
            rival = count - free
            if rival >= 0 and (rival >= len(rivals) or rivals[rival] >= rank):
                return count
        return len(ranks)

    def prune(self, node: Node) -> None:
        """Pages below the last anchor of a branch can never be used: gives them up at once."""
        while self.recurrent and node.parent is not None and not (node.in_use or node.children or node.anchors):
            parent = node.parent
            self._remove(node)
            node = parent

    def forget(self, node: Node, tokens: bytes, running: set[Node]) -> None:
        """Gives up and erases the path of `tokens` to `node`, with every branch from it, as far up as no running path
        goes, and every anchor on the whole of it.

        running: nodes of the running paths. What a copy reads stays until `sweep`, and is not found any more.
        """
        path = list(node.path())
        for step in (*path, self.tree.root):
            rest = tokens[step.depth * self.tree.page_size * TOKEN_BYTES :]
            for anchor in [each for tail, each in step.anchors.items() if rest.startswith(tail)]:
                self.tree.hide_anchor(anchor)
                self.let_go(anchor)
        doomed = [step for step in path if step not in running]
        if doomed:
            self.tree.detach(doomed[-1])
        self.sweep()

    def let_go(self, anchor: Anchor) -> None:
        """A copy does not read it any more, or it was hidden: then it goes as soon as nothing reads it."""
        if not anchor.holds and anchor.node.anchors.get(anchor.tail) is not anchor:
            self._drop(anchor, erase=True)

    def sweep(self) -> None:
        """Gives up what was forgotten and is not read any more."""
        if self.tree.limbo.children:
            for node in leaves_first(self.tree.limbo)[:-1]:
                if not node.in_use:
                    self.storage.erase_page(node.page)
                    self._remove(node, erase=True)

    def clear(self) -> None:
        """Forgets everything that nobody uses."""
        for anchor in [each for each in self.tree.root.anchors.values() if not each.holds]:
            self._drop(anchor)
        while self.evict_page():
            pass

    def free_slot(self, slot: int, *, erase: bool = False) -> None:
        if erase:
            self.storage.erase_slot(slot)
        self.slots.free(slot)

    def _victim(self, but: Anchor | None = None) -> Anchor | None:
        free = (anchor for anchor in self.tree.anchors if not anchor.holds and anchor is not but)
        return min(free, key=self.tree.policy.anchor_rank, default=None)

    def _evict_anchor(self, anchor: Anchor) -> None:
        node, before = anchor.node, self.tree.size
        self._drop(anchor)
        self.anchor_evictions += 1
        self.prune(node)
        self.page_evictions += before - self.tree.size

    def _drop(self, anchor: Anchor, *, erase: bool = False) -> None:
        self.free_slot(self.tree.take_anchor(anchor), erase=erase)

    def _remove(self, node: Node, *, erase: bool = False) -> None:
        """A leaf that is not in use, with its anchors."""
        for anchor in list(node.anchors.values()):
            self._drop(anchor, erase=erase)
        self.tree.remove(node)
        self.pages.free(node.page)
