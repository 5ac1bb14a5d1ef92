"""Lower tiers as the cache sees them, with nothing but dictionaries behind: transfers happen when a test says so.

Until then they read and write nothing, as a thread that comes late would: what the cache does not hold for them is
overwritten by then, and shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ftengine.cache.tiers.base import TOKEN_BYTES, Found, Kept, Ticket, TierSizes
from ftengine.core import BoundaryKind, CacheTensors


@dataclass
class Record:
    rows: list[torch.Tensor]  # per layer of keys, then of values: [tokens, heads, dim]
    states: list[torch.Tensor]
    kind: BoundaryKind


class FakeTiers:
    """chance, failing: how often a restore does not give what was found."""

    def __init__(self, tensors: CacheTensors, *, failing: float = 0.0, seed: int = 0) -> None:
        self.tensors = tensors
        self.records: dict[bytes, Record] = {}
        self.queued: list[Callable[[], None]] = []
        self.failing = failing
        self.chance = random.Random(seed)
        self.kept: list[Kept] = []
        self.restored = 0
        self.wake: Callable[[], None] = lambda: None

    def find(self, tokens: bytes, limit: int, above: int) -> Found | None:
        best, key = above, None
        for path in self.records:
            count = self._common(path, tokens, limit)
            if count > best:
                best, key = count, path
        if key is None:
            return None
        kind = self.records[key].kind if self.tensors.states else None
        return Found(best, self.chance.choice(["host", "disk"]), kind, handle=self.records[key])

    def _common(self, path: bytes, tokens: bytes, limit: int) -> int:
        if self.tensors.states:
            length = len(path) // TOKEN_BYTES
            return length if length <= limit and tokens.startswith(path) else 0
        count = 0
        while count < limit and path[4 * count : 4 * count + 4] == tokens[4 * count : 4 * count + 4] != b"":
            count += 1
        return count

    def restore(self, found: Found, tokens: bytes, start: int, pages: list[int], slot: int, *whose) -> Ticket:
        ticket, record = Ticket(), found.handle
        assert start % self.tensors.page_size == 0
        assert len(pages) == -(-found.tokens // self.tensors.page_size)
        given = found.tokens if self.chance.random() >= self.failing else self.chance.randrange(found.tokens)

        def work() -> None:
            for layer, rows in zip((*self.tensors.keys, *self.tensors.values), record.rows, strict=True):
                for at in range(start, given):
                    layer[pages[at // self.tensors.page_size], at % self.tensors.page_size] = rows[at]
            if given == found.tokens:
                for state, kept in zip(self._states(), record.states, strict=True):
                    state[slot] = kept
            elif self.tensors.states:
                for state in self._states():
                    state[slot] = torch.nan  # half a state
            self.restored += given == found.tokens
            ticket.tokens, ticket.reason = given, "" if given == found.tokens else "it is not what it was"
            ticket.done = True
            self.wake()

        self.queued.append(work)
        return ticket

    def keep(self, kept: Kept) -> Ticket | None:
        self.kept.append(kept)
        if kept.tokens in self.records or not kept.tokens:
            return None
        count, size = len(kept.tokens) // TOKEN_BYTES, self.tensors.page_size
        assert len(kept.pages) == count // size
        assert (kept.companion >= 0) == (count % size > 0)
        assert (kept.slot >= 0) == bool(self.tensors.states)
        ticket = Ticket()

        def work() -> None:
            pages = torch.tensor([*kept.pages, *([kept.companion] if kept.companion >= 0 else [])])
            layers = (*self.tensors.keys, *self.tensors.values)
            rows = [layer[pages].flatten(0, 1)[:count].clone() for layer in layers]
            states = [state[kept.slot].clone() for state in self._states()]
            self.records[kept.tokens] = Record(rows, states, kept.kind)
            ticket.done = True
            self.wake()

        self.queued.append(work)
        return ticket

    def forget(self, tokens: bytes) -> None:
        self.pump(len(self.queued))
        common = 8 * TOKEN_BYTES
        self.records = {path: each for path, each in self.records.items() if path[:common] != tokens[:common]}

    def pump(self, most: int) -> None:
        for _ in range(min(most, len(self.queued))):
            self.queued.pop(0)()

    def sizes(self) -> list[TierSizes]:
        return []

    def rest(self, idle: bool) -> None:
        pass

    def check_integrity(self) -> None:
        pass

    def close(self, seconds: float) -> None:
        self.pump(len(self.queued))

    def _states(self) -> list[torch.Tensor]:
        return [state for layer in self.tensors.states for state in layer.values()]
