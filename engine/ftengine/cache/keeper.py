"""Copies to the lower tiers that are under way: until one is done, what it reads is held."""

from __future__ import annotations

from dataclasses import dataclass

from ftengine.cache.node import Anchor, Node
from ftengine.cache.store import DeviceStore
from ftengine.cache.tiers.base import Kept, Ticket, Tiers


@dataclass(frozen=True, eq=False)
class Copy:
    ticket: Ticket
    node: Node
    anchor: Anchor | None


class Keeper:
    def __init__(self, store: DeviceStore) -> None:
        self._store = store
        self.copies: list[Copy] = []  # oldest first

    @property
    def under_way(self) -> int:
        return len(self.copies)

    def keep(self, tiers: Tiers, kept: Kept, node: Node, anchor: Anchor | None) -> None:
        """node: the last full page of the path; anchor: whose slot `kept` names."""
        ticket = tiers.keep(kept)
        if ticket is None:
            if anchor is not None:
                anchor.below = True
            return
        self._store.tree.acquire(node)
        if anchor is not None:
            anchor.holds += 1
        self.copies.append(Copy(ticket, node, anchor))

    def hurry(self) -> None:
        """What copies hold is needed: those that can end early may do so."""
        for copy in self.copies:
            copy.ticket.unwanted = True

    def tick(self) -> None:
        """Lets go of what has been copied. Waits for nothing."""
        done = [copy for copy in self.copies if copy.ticket.done]
        if not done:
            return
        self.copies = [copy for copy in self.copies if copy not in done]  # others may be done by now
        for copy in done:
            if copy.anchor is not None:
                copy.anchor.holds -= 1
                copy.anchor.below = not copy.ticket.reason
                self._store.let_go(copy.anchor)
            self._store.tree.release(copy.node)
            self._store.prune(copy.node)
        self._store.sweep()

    def held(self) -> list[tuple[Node, Anchor | None]]:
        return [(copy.node, copy.anchor) for copy in self.copies]
