"""Pages and recurrent states of running sequences, and what they leave to the prefix tree and to the lower tiers.

Every full page a running sequence has computed is in the tree, referenced by it; so sequences with a common prefix
share pages while they run, and at the end pages only lose a reference. The last, partly filled page and the pages
reserved ahead are the sequence's own.

A model with recurrent state can go on only where an anchor keeps the state: at the boundaries that its request names,
at most `spacing` tokens apart inside what is new, before the prompt's last token, and where the sequence ended. Without
such a state any common prefix counts, down to the token; anchors then only hold the last tokens of a path.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from ftengine.cache import integrity
from ftengine.cache.anchors import Anchors
from ftengine.cache.captures import SPACING, Planned
from ftengine.cache.keeper import Keeper
from ftengine.cache.match import Match, match
from ftengine.cache.node import Anchor, Node
from ftengine.cache.place import Known, Place, Restore, packed
from ftengine.cache.policy import CachePolicy, ValuePolicy
from ftengine.cache.reuse import Admission, ReuseCounts
from ftengine.cache.sessions import Sessions
from ftengine.cache.storage import Storage
from ftengine.cache.store import DeviceStore
from ftengine.cache.tiers.base import TOKEN_BYTES, Found, Tiers
from ftengine.cache.tree import PrefixTree
from ftengine.core import BoundaryKind, CacheTensors, Reused, Sequence

LEAST_RESTORED = 32  # tokens beyond what the device has, for which the lower tiers are asked


class SequenceCache:
    """sessions: shared with the tiers. reuse: what prompts found."""

    def __init__(
        self,
        tensors: CacheTensors,
        pages: int,
        slots: int,
        policy: CachePolicy | None = None,
        tiers: Tiers | None = None,
        *,
        sessions: Sessions | None = None,
        spacing: int = SPACING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tensors: from allocate_cache with the same pages and slots.

        slots: of running sequences and anchors together, for all models. One costs a recurrent state (none for models
        of attention only, whose running sequences take no slot) and a page for the keys and values of an anchor's tail.
        """
        self.tensors = tensors
        self.page_size = tensors.page_size
        self.has_state = bool(tensors.states)
        self.sessions = Sessions() if sessions is None else sessions
        self.clock = clock
        self.reuse = ReuseCounts()
        self.storage = Storage(tensors, pages)
        page_bytes = self.storage.page_bytes
        policy = policy or ValuePolicy(self.sessions, self.page_size, page_bytes, recurrent=self.has_state, clock=clock)
        self.tree = PrefixTree(self.page_size, policy)
        self.store = DeviceStore(self.storage, self.tree, pages, slots, recurrent=self.has_state)
        self.pages, self.slots = self.store.pages, self.store.slots
        self.keeper = Keeper(self.store)
        self.places: dict[Sequence, Place] = {}  # of running sequences
        self.abandoned: list[Sequence] = []  # of those, the ones that ended while they were restored
        self._anchors = Anchors(self.store, self.keeper, spacing, page_bytes + self.storage.state_bytes, clock)
        self._known: WeakKeyDictionary[Sequence, Known] = WeakKeyDictionary()
        self.tiers = tiers

    @property
    def tiers(self) -> Tiers | None:
        """Below the device. To be set when warming up is over: what is computed then is worth nothing."""
        return self._anchors.tiers

    @tiers.setter
    def tiers(self, tiers: Tiers | None) -> None:
        self._anchors.tiers = tiers

    @property
    def available(self) -> int:
        """Pages free now or to be had by forgetting cached prefixes."""
        return self.store.available

    @property
    def pages_running(self) -> int:
        """Pages that running sequences and copies under way use."""
        return self.pages.used_count - self.tree.evictable

    @property
    def page_evictions(self) -> int:
        return self.store.page_evictions

    @property
    def anchor_evictions(self) -> int:
        return self.store.anchor_evictions

    @property
    def copying(self) -> int:
        """Transfers to and from the lower tiers that are under way. What they use is not to be had until they end."""
        return self.keeper.under_way + sum(place.restore is not None for place in self.places.values())

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def admit(self, sequence: Sequence, headroom: int = 0) -> bool:
        """Gives a waiting sequence its cached prefix, pages for all its tokens and a state slot.

        Sets pages, state_slot and computed. At least one token stays to be computed, for its logits.
        headroom: pages that must still be available afterwards. Returns False, with nothing changed, if they are not,
        or if copies under way hold what it needs.

        If the lower tiers have more of it than the device, it is `restoring` from then on: `tick` tells when it can
        take part in steps.
        """
        known = self._know(sequence)
        tokens, limit = bytes(known.pack(sequence)), len(sequence.tokens) - 1
        found = match(self.store, tokens, limit)
        below = self._below(known, tokens, limit, found)
        path = found.path if below is None else found.full[: below.tokens // self.page_size]
        node = path[-1] if path else self.tree.root
        self.tree.acquire(node)
        missing = self.pages_for(len(sequence.tokens)) - node.depth
        if missing + headroom > self.available or (self.has_state and not self.store.can_run()):
            self.tree.release(node, node.use)
            self.keeper.hurry()
            return False
        if found.owner is not None and missing >= self.available:
            found = found.without_donor()  # while it is copied it cannot make way, and all that may is needed
        self.places[sequence] = place = Place(known, node, found.anchor)
        sequence.pages = [step.page for step in path]
        if below is None:
            self._start(sequence, place, found)
        else:
            self._restore(sequence, place, below, tokens)
        return True

    def restoring(self, sequence: Sequence) -> bool:
        """Whether the lower tiers are filling its pages; `computed` says nothing then."""
        return sequence in self.places and self.places[sequence].restore is not None

    def reused(self, sequence: Sequence) -> Reused:
        """What its prompt found when it was admitted first."""
        return self._known[sequence].reused or Reused()

    def tick(self) -> list[tuple[Sequence, bool]]:
        """Takes note of transfers that have ended; waits for nothing. To be called once a step, and when one ended.

        Returns the sequences that were restoring: True if they can take part in steps now; False for one that lost all
        it had, because what the lower tiers promised is not there: it has to be admitted anew.
        """
        self.keeper.tick()
        ended = [
            (sequence, place)
            for sequence, place in self.places.items()
            if place.restore is not None and place.restore.ticket.done
        ]
        told = []
        for sequence, place in ended:
            there = self._restored(sequence, place)
            if sequence not in self.abandoned:
                told.append((sequence, there))
                continue
            self.abandoned.remove(sequence)
            if there:
                self.release(sequence)
        return told

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Makes sure that pages for the first `tokens` tokens are there; False if they cannot be had."""
        missing = self.pages_for(tokens) - len(sequence.pages)
        if missing > self.available:
            self.keeper.hurry()
            return False
        sequence.pages += [self.store.page() for _ in range(missing)]
        return True

    def plan(self, sequence: Sequence, end: int) -> tuple[int, tuple[Planned, ...]]:
        """For a step that computes the sequence's tokens up to `end`: where it should end instead, so that what it
        keeps finds slots, and what it keeps where. The slots are the plan's until `commit` or `release`."""
        place = self.places[sequence]
        return self._anchors.plan(sequence, place, end), tuple(place.planned)

    def keeps_next(self, sequence: Sequence) -> bool:
        """Whether the state after all the tokens it has now is to be kept, so that no step may follow at once."""
        return self._anchors.wanted(sequence, self.places[sequence]) is not None

    def commit(self, sequence: Sequence, *, ending: bool = False) -> None:
        """After a step: full pages go to the tree, and states are kept where they may be wanted again.

        To be called before the sampled token is appended. ending: the sequence is released next, with its state.
        """
        place = self.places[sequence]
        trail = self._enter_pages(sequence, place)
        if place.planned:
            self._anchors.captured(sequence, place, trail)
        if sequence.computed == len(sequence.tokens) and not ending:
            kind = self._anchors.wanted(sequence, place)
            if kind is not None:
                self._anchors.copy(sequence, place, kind)
        if not self.has_state and sequence.computed == sequence.prompt_length:
            self._anchors.hand_down(sequence, place, BoundaryKind.PROMPT_END)

    def release(self, sequence: Sequence, *, keep: bool = True, halfway: bool = False, below: bool = True) -> None:
        """The sequence stops running: what it computed stays in the tree without a reference, the rest is free.

        keep: False if its numbers are not to be trusted; its path is then forgotten as far as nothing else runs on it.
        halfway: a step stopped in its middle; its state is then of some tokens in some layers, of others in others.
        below: whether the lower tiers may copy where it ended, and hold that for as long.
        """
        place = self.places[sequence]
        if place.restore is not None:
            self.abandoned.append(sequence)  # its pages and its slot are being written
            return
        tokens = bytes(place.known.pack(sequence)[: TOKEN_BYTES * sequence.computed])
        for planned in place.planned:
            self.store.free_slot(planned.slot, erase=not keep)
        if keep and sequence.computed and not (self.has_state and halfway):
            self._anchors.leave(sequence, place, below=below)
        elif self.has_state:
            self.store.free_slot(sequence.state_slot, erase=not keep)
        self._let_go(sequence, place, erase=not keep)
        if keep:
            self.sessions.end(place.turn, tokens, self.clock())
            return
        self.store.forget(place.node, tokens, running=self._running_nodes())
        if self.tiers is not None:
            self.tiers.forget(tokens)

    def clear(self) -> None:
        """Forgets every cached prefix that nothing uses, whose they were, and what was reused or made way."""
        self.store.clear()
        self.store.page_evictions = self.store.anchor_evictions = 0
        self.sessions.clear()
        self.reuse = ReuseCounts()

    def check_idle(self) -> None:
        """With nothing running: raises AssertionError if a count shows a leak; as quick for a full cache."""
        integrity.check_idle(self.store, self.keeper, self.places, self.abandoned)
        if self.tiers is not None:
            self.tiers.check_integrity()

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raises AssertionError if a page, slot or reference is leaked, shared wrongly or counted wrongly."""
        integrity.check(self.store, self.keeper, self.places, [*running, *self.abandoned])
        if self.tiers is not None:
            self.tiers.check_integrity()

    def _know(self, sequence: Sequence) -> Known:
        known = self._known.get(sequence)
        if known is None:
            request = sequence.request
            system = max((at.position for at in request.boundaries if at.kind is BoundaryKind.SYSTEM), default=0)
            tokens = packed(request.prompt)
            turn = self.sessions.begin(tokens, request.session, request.side, self.clock(), system)
            known = self._known[sequence] = Known(turn, bytearray(tokens))
        return known

    def _below(self, known: Known, tokens: bytes, limit: int, found: Match) -> Found | None:
        """What the lower tiers have beyond what the device has, if that is worth a transfer."""
        above = self._tokens(found)
        if self.tiers is None or known.direct or limit - above < LEAST_RESTORED:
            return None
        below = self.tiers.find(tokens, limit, above)
        return below if below is not None and below.tokens - above >= LEAST_RESTORED else None

    def _tokens(self, found: Match) -> int:
        return len(found.path) * self.page_size + found.tail

    def _start(self, sequence: Sequence, place: Place, found: Match) -> None:
        """From what the device has. What is copied from must not make way for what it is copied to."""
        anchor = found.anchor
        if self.has_state:
            self._take_state(sequence, anchor)
        if found.owner is not None:
            self.tree.acquire(found.owner)
        reserved = self.reserve(sequence, len(sequence.tokens))
        assert reserved
        if found.tail:
            self.storage.copy_pages([(found.donor, sequence.pages[place.node.depth])])
        if found.owner is not None:
            self.tree.release(found.owner, found.owner.use)
        if anchor is not None:
            anchor.worth.use(place.turn.session, place.turn.side, place.turn.number, self.clock())
        sequence.computed = self._tokens(found)
        kind = anchor.worth.kind if anchor is not None and self.has_state else None
        self._admitted(sequence, place, "device", kind)

    def _take_state(self, sequence: Sequence, anchor: Anchor | None) -> None:
        """A slot with the state of `anchor`. Where a sequence begins, the model zeroes it."""
        source = -1 if anchor is None else anchor.slot
        slot = self.store.slot_to_run(anchor)
        assert slot is not None, "more sequences run than there are state slots"
        if source not in (-1, slot):
            self.storage.copy_state(source, slot)
        sequence.state_slot = slot

    def _restore(self, sequence: Sequence, place: Place, found: Found, tokens: bytes) -> None:
        assert self.tiers is not None
        if self.has_state:
            self._take_state(sequence, None)
        reserved = self.reserve(sequence, len(sequence.tokens))
        assert reserved
        start, pages = place.node.depth * self.page_size, sequence.pages[: self.pages_for(found.tokens)]
        turn = place.turn
        ticket = self.tiers.restore(
            found, tokens, start, pages, sequence.state_slot, turn.session, turn.side, turn.number
        )
        place.restore = Restore(ticket, found)

    def _restored(self, sequence: Sequence, place: Place) -> bool:
        """The transfer has ended. False if there is no state to go on from; nothing is held then."""
        assert place.restore is not None
        found, tokens = place.restore.found, place.restore.ticket.tokens
        place.restore = None
        if self.has_state and tokens != found.tokens:
            # Half of it may be there: nothing of that is kept.
            place.known.direct = True
            self.store.free_slot(sequence.state_slot, erase=True)
            self._let_go(sequence, place, erase=True)
            return False
        above = place.node.depth * self.page_size
        sequence.computed = max(above, min(tokens, found.tokens))
        place.tried = sequence.computed
        complete = tokens == found.tokens
        self._admitted(sequence, place, found.tier if tokens > above else "device", found.kind if complete else None)
        self._enter_pages(sequence, place)
        return True

    def _admitted(self, sequence: Sequence, place: Place, tier: str, kind: BoundaryKind | None) -> None:
        known, turn, prompt = place.known, place.turn, sequence.prompt_length
        if known.reused is None:
            tier = tier if sequence.computed else ""
            known.reused = Reused(sequence.computed, tier, kind, turn.changed)
            self.reuse.add(Admission(turn.session, turn.side, prompt, known.reused, turn.known))

    def _enter_pages(self, sequence: Sequence, place: Place) -> list[Node]:
        """Full pages go to the tree. Returns the nodes that the step went through, from where the sequence was."""
        node, size, trail = place.node, self.page_size, [place.node]
        if (node.depth + 1) * size > sequence.computed:
            return trail
        tokens = place.known.pack(sequence)
        while (node.depth + 1) * size <= sequence.computed:
            start, own = node.depth * size, sequence.pages[node.depth]
            node = self.tree.extend(node, bytes(tokens[start * TOKEN_BYTES : (start + size) * TOKEN_BYTES]), own)
            if node.page != own:  # another sequence computed the same page first: use that one
                sequence.pages[node.depth - 1] = node.page
                self.pages.free(own)
            trail.append(node)
        place.node = node
        return trail

    def _let_go(self, sequence: Sequence, place: Place, *, erase: bool) -> None:
        """Its own pages are free, its path loses a reference."""
        del self.places[sequence]
        for page in sequence.pages[place.node.depth :]:
            if erase:
                self.storage.erase_page(page)
            self.pages.free(page)
        sequence.pages, sequence.state_slot, sequence.computed = [], -1, 0
        self.tree.release(place.node, place.use(self.clock()))
        self.store.prune(place.node)

    def _running_nodes(self) -> set[Node]:
        return {node for place in self.places.values() for node in place.node.path()}
