"""The rules of the expert cache in plain Python: dicts, lists and sorting. What the kernels must agree with.

Scores are given (the tests check them against a formula of their own): a last digit may not decide a comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ftengine.experts.split import LaneCosts, forced_share


@dataclass
class Decision:
    """Of one layer in one step; experts in the order of the kernels' lists."""

    hits: list[int]
    fetched: list[tuple[int, int]]  # expert, slot
    kept: int
    cpu: set[int]
    admitted: list[tuple[int, int]]


@dataclass
class CacheModel:
    layers: int
    slots: int
    staging: int
    costs: LaneCosts
    share: float | None = None
    gated: bool = True
    budget: float = 1.0
    cpu: bool = True
    fetch: bool = True
    window: int = 32
    ahead: int = 0  # staging slots behind the others
    table: dict[tuple[int, int], int] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        self.held: list[tuple[int, int] | None] = [None] * self.slots
        self.busy: set[int] = set()
        self.queue = [(slot, -math.inf) for slot in range(self.slots)]
        self.arriving: list[tuple[tuple[int, int], int]] = []
        self.early: dict[tuple[int, int], int] = {}  # what is prefetched for the layer under way

    def route(self, layer: int, wanted: list[int], worth: dict[int, float], score: dict[int, float]) -> Decision:
        """wanted: distinct experts in order of first use. worth orders the missing, score decides what stays."""
        hits = [expert for expert in wanted if (layer, expert) in self.table or (layer, expert) in self.early]
        self.busy.update(self.table[layer, expert] for expert in hits if (layer, expert) in self.table)
        missing = sorted((expert for expert in wanted if expert not in hits), key=lambda e: (-worth[e], e))
        window, self.queue = self.queue[: self.window], self.queue[self.window :]
        victims = [(slot, value) for slot, value in window if slot not in self.busy]
        count = self._fetches(len(missing))
        better = [
            place < len(victims) and (not self.gated or score[expert] > victims[place][1])
            for place, expert in enumerate(missing)
        ]
        kept = max(sum(better[:count]), count - self.staging)
        kept = min(kept, len(victims))
        count = min(count, kept + self.staging)
        turn = self.step + layer
        allowed = math.floor((turn + 1) * self.budget) - math.floor(turn * self.budget)
        if not self.cpu or not self.fetch or kept != count:
            allowed = 0
        admitted = sum(better[count : count + allowed])
        for place in range(kept + admitted):
            self._empty(victims[place][0])
        fetched = []
        for place, expert in enumerate(missing[:count]):
            slot = victims[place][0] if place < kept else self.slots + place - kept
            fetched.append((expert, slot))
            if place < kept:
                self._put((layer, expert), slot)
        background = [
            (expert, victims[count + place][0]) for place, expert in enumerate(missing[count : count + admitted])
        ]
        self.arriving += [((layer, expert), slot) for expert, slot in background]
        self.queue = victims[kept + admitted :] + self.queue
        return Decision(hits, fetched, kept, set(missing[count:]), background)

    def prefetch(self, layer: int, mass: dict[int, float], fresh: dict[int, float], most: int) -> list[tuple[int, int]]:
        """mass: of the experts expected in `layer`; fresh: their scores if they are used so. -> expert, slot."""
        missing = sorted((expert for expert in mass if (layer, expert) not in self.table), key=lambda e: (-mass[e], e))
        expected = {self.table[layer, expert] for expert in mass if (layer, expert) in self.table}
        window = self.queue[:64]
        places = [place for place, (slot, _) in enumerate(window) if slot not in self.busy and slot not in expected]
        half, listed, popped = self.ahead // 2, [], set()
        for entry, expert in enumerate(missing[:most]):
            slot, value = window[places[entry]] if entry < len(places) else (-1, math.inf)
            if slot >= 0 and (not self.gated or fresh[expert] > value):
                popped.add(slot)
            elif entry < half:
                slot = self.slots + self.staging + (layer % 2) * half + entry
            else:
                break
            listed.append((expert, slot))
        for slot in popped:
            self._empty(slot)
        for expert, slot in listed:
            if slot in popped:
                self._put((layer, expert), slot)
        self.early = {(layer, expert): slot for expert, slot in listed}
        left = next((place for place in places if window[place][0] not in popped), len(window))
        self.queue = self.queue[left:]
        return listed

    def end_step(self, score: dict[tuple[int, int], float]) -> None:
        for key, slot in self.arriving:
            self._put(key, slot)
        self.arriving, self.busy = [], set()
        self.step += 1
        self.requeue(score)

    def requeue(self, score: dict[tuple[int, int], float]) -> None:
        values = [-math.inf if key is None else score[key] for key in self.held]
        self.queue = sorted(enumerate(values), key=lambda pair: (pair[1], pair[0]))

    def _fetches(self, missing: int) -> int:
        if not self.fetch:
            return 0
        if not self.cpu:
            return missing
        return self.costs.link_share(missing) if self.share is None else forced_share(missing, self.share)

    def _empty(self, slot: int) -> None:
        key = self.held[slot]
        if key is not None:
            del self.table[key]
        self.held[slot] = None
        self.busy.add(slot)

    def _put(self, key: tuple[int, int], slot: int) -> None:
        self.table[key] = slot
        self.held[slot] = key
