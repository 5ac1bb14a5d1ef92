"""Anchors of running sequences: which a step makes, how they come about, and that the lower tiers hear of them."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from ftengine.cache.captures import SHORTEST, Planned, places, thinned
from ftengine.cache.keeper import Keeper
from ftengine.cache.node import Anchor, Node, standing
from ftengine.cache.place import Place
from ftengine.cache.store import DeviceStore, Rank
from ftengine.cache.tiers.base import TOKEN_BYTES, Kept, Tiers
from ftengine.cache.value import LIKELIHOOD, Worth
from ftengine.core import Boundary, BoundaryKind, Sequence


class Anchors:
    """tiers: who copies new anchors, or None. slot_bytes: of a state with its companion page."""

    def __init__(
        self, store: DeviceStore, keeper: Keeper, spacing: int, slot_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.tiers: Tiers | None = None
        self.spacing = spacing
        self._store = store
        self._keeper = keeper
        self._slot_bytes = slot_bytes
        self._clock = clock
        self._page_size = store.tree.page_size

    def plan(self, sequence: Sequence, place: Place, end: int) -> int:
        """Plans what the step up to `end` keeps, with a slot for each, and returns where the step should end."""
        start, store = sequence.computed, self._store
        if not store.recurrent or end - start < 2:
            return end
        wanted = places(sequence.request, start, end, place.behind(), self._page_size, self.spacing)
        if not wanted:
            return end
        there = store.tree.anchors_ahead(place.node, bytes(place.known.pack(sequence)), end)
        wanted = [each for each in wanted if each.position not in there]
        room = self._room(place, wanted, start)
        if self.tiers is not None and end < sequence.prompt_length and store.slots.free_count < 2 * len(wanted):
            # Half of scarce slots: the other half is being copied while a step computes, and each step needs some.
            room = min(room, -(-(room + self._keeper.under_way) // 2))
        if self.tiers is not None and 0 < room < len(wanted):
            # The lower tiers empty the slots for the next step.
            shortest = start + max(SHORTEST, (end - start) // 2)
            last = -(-max(wanted[room - 1].position, shortest) // self._page_size) * self._page_size
            end = min(end, last)
            wanted = [each for each in wanted if each.position <= end]
        for each in thinned(wanted, room, start):
            slot = store.slot()
            assert slot is not None, "there is less room than was counted"
            place.planned.append(Planned(each.position, each.kind, slot))
        return end

    def _room(self, place: Place, wanted: list[Boundary], start: int) -> int:
        """How many of them find slots. The fewer, the more each is worth."""

        def fits(count: int) -> bool:
            chosen = thinned(wanted, count, start)
            before = [_position(standing(place.anchor)), *(each.position for each in chosen)]
            ranks = [
                self._rank(place, each.position, each.kind, each.position - behind)
                for each, behind in zip(chosen, before, strict=False)
            ]
            return self._store.room(sorted(ranks, reverse=True)) == count

        return bisect.bisect_left(range(1, len(wanted) + 1), True, key=lambda count: not fits(count))

    def wanted(self, sequence: Sequence, place: Place) -> BoundaryKind | None:
        """As what the state after all present tokens is to be kept while decoding; None if it is not."""
        if not self._store.recurrent or not sequence.generated:
            return None
        if sequence.tokens[-1] in sequence.request.boundary_tokens:
            return BoundaryKind.MESSAGE  # which kind of block begins or ends there, the token does not say
        return BoundaryKind.SPACING if len(sequence.tokens) - place.behind() >= self.spacing else None

    def captured(self, sequence: Sequence, place: Place, trail: list[Node]) -> None:
        """The step is over whose plan this was. trail: nodes that it went through, from where the sequence was."""
        planned, place.planned = place.planned, []
        first = trail[0].depth
        made = [self._make(sequence, place, trail[each.position // self._page_size - first], each) for each in planned]
        self._fill([each for each in made if each is not None], sequence, place)

    def copy(self, sequence: Sequence, place: Place, kind: BoundaryKind) -> None:
        """Keeps the state that the sequence has now; the sequence goes on in its own slot."""
        position = place.tried = sequence.computed
        slot = self._store.slot(self._rank(place, position, kind, position - _position(standing(place.anchor))))
        if slot is not None:
            self._store.storage.copy_state(sequence.state_slot, slot)
            self._finish(sequence, place, Planned(position, kind, slot))

    def leave(self, sequence: Sequence, place: Place, *, below: bool) -> None:
        """Keeps where the sequence ends. Its slot changes hands. below: as of SequenceCache.release."""
        position, kind = sequence.computed, BoundaryKind.ANSWER_END
        slot: int | None = sequence.state_slot
        if not self._store.recurrent:
            tail = position % self._page_size
            slot = self._store.slot(self._rank(place, position, kind, tail)) if tail else None
        if slot is not None:
            self._finish(sequence, place, Planned(position, kind, slot), below=below)
        elif below:
            self.hand_down(sequence, place, kind)

    def hand_down(self, sequence: Sequence, place: Place, kind: BoundaryKind, anchor: Anchor | None = None) -> None:
        """The lower tiers may copy the path to `anchor`, or to the sequence's last full page."""
        node = place.node if anchor is None else anchor.node
        position = node.depth * self._page_size if anchor is None else anchor.position
        if self.tiers is None or not position:
            return
        turn, tail = place.turn, anchor is not None and anchor.tail
        kept = Kept(
            tokens=bytes(place.known.pack(sequence)[: position * TOKEN_BYTES]),
            pages=sequence.pages[: node.depth],
            companion=self._store.storage.companion(anchor.slot) if anchor is not None and tail else -1,
            slot=anchor.slot if anchor is not None and self._store.recurrent else -1,
            kind=kind,
            session=turn.session,
            side=turn.side,
            turn=turn.number,
        )
        self._keeper.keep(self.tiers, kept, node, anchor)

    def _finish(self, sequence: Sequence, place: Place, planned: Planned, *, below: bool = True) -> None:
        anchor = self._make(sequence, place, place.node, planned)
        if anchor is not None:
            self._fill([anchor], sequence, place, below=below)

    def _make(self, sequence: Sequence, place: Place, node: Node, planned: Planned) -> Anchor | None:
        """An anchor less than a page behind `node`. None if there is one: that is used, and the slot is free."""
        start, end = node.depth * self._page_size * TOKEN_BYTES, planned.position * TOKEN_BYTES
        tail = bytes(place.known.pack(sequence)[start:end])
        worth = self._worth(place, planned.position, planned.kind)
        there = node.anchors.get(tail)
        if there is not None:
            self._store.free_slot(planned.slot)
            worth.kind = max(worth.kind, there.worth.kind, key=LIKELIHOOD.__getitem__)
            worth.uses = there.worth.uses
            there.worth = worth
            place.anchor = there
            return None
        anchor = Anchor(node, tail, planned.slot, worth, standing(place.anchor))
        self._store.tree.put_anchor(anchor)
        place.anchor = anchor
        return anchor

    def _fill(self, made: list[Anchor], sequence: Sequence, place: Place, *, below: bool = True) -> None:
        """New anchors get their tails' keys and values, all in one go, and the lower tiers hear of them."""
        storage = self._store.storage
        tails = [(sequence.pages[each.node.depth], storage.companion(each.slot)) for each in made if each.tail]
        storage.copy_pages(tails)
        for anchor in made if below else ():
            self.hand_down(sequence, place, anchor.worth.kind, anchor)

    def _rank(self, place: Place, position: int, kind: BoundaryKind, saved: int) -> Rank:
        worth = self._worth(place, position, kind)
        worth.saved = saved
        return self._store.tree.policy.worth_rank(worth)

    def _worth(self, place: Place, position: int, kind: BoundaryKind) -> Worth:
        turn, now = place.turn, self._clock()
        return Worth(kind, turn.session, turn.side, now, bytes=self._slot_bytes, position=position, turn=turn.number)


def _position(anchor: Anchor | None) -> int:
    return 0 if anchor is None else anchor.position
