"""Replays a routing trace through a cache of whole experts: what would have been found in its slots.

One pool over all layers; every missing expert takes the slot of the worst resident that the layer at hand does not
use. Rules of the victim:

    lru     used longest ago
    aged    lowest score of kernels/triton/cache_state.py: the router's probability, aged with a half-life of 8 steps
    belady  used furthest in the future: the bound, for a cache that must take in what it misses
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ftengine.experts.trace import Array, Trace

POLICIES = ("lru", "aged", "belady")
HALF_LIFE = 8.0
NEVER = np.int64(1) << 60


@dataclass(frozen=True)
class Replayed:
    policy: str
    slots: int
    lookups: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """0..1."""
        return self.hits / self.lookups if self.lookups else 1.0


def replay(trace: Trace, slots: int, policy: str, warm: int = 0) -> Replayed:
    """The cache starts empty; the first `warm` steps fill it and are not counted. Raises ValueError."""
    if not 0 <= warm < trace.steps:
        raise ValueError(f"of {trace.steps} steps {warm} cannot be left out")
    hits = _RULES[policy](trace, slots)[warm:]
    return Replayed(policy, slots, trace.layers * trace.top_k * len(hits), int(hits.sum()))


def _lru(trace: Trace, slots: int) -> Array:
    hits = np.zeros(trace.steps, np.int64)
    keys = (trace.ids + np.arange(trace.layers)[:, None] * trace.experts).tolist()
    held: OrderedDict[int, None] = OrderedDict()
    for step, layers in enumerate(keys):
        for wanted in layers:
            found = [key in held for key in wanted]
            hits[step] += sum(found)
            for key in wanted:
                held[key] = None
                held.move_to_end(key)
            while len(held) > slots:
                held.popitem(last=False)
    return hits


def _aged(trace: Trace, slots: int) -> Array:
    # Scores grow with time as in the kernels; float64 needs no moving back.
    score = np.full(trace.layers * trace.experts, -np.inf)
    offsets = np.arange(trace.layers) * trace.experts
    mass = trace.probabilities.astype(np.float64) + 1e-6
    cache = _Slots(slots, score)
    hits = np.zeros(trace.steps, np.int64)
    for step in range(trace.steps):
        now = step / HALF_LIFE
        for layer in range(trace.layers):
            near = trace.near[step, layer] + offsets[layer]
            score[near] = np.log2(np.exp2(score[near] - now) + mass[step, layer]) + now
            hits[step] += cache.use(trace.ids[step, layer] + offsets[layer])
    return hits


def _belady(trace: Trace, slots: int) -> Array:
    following = _next_uses(trace)
    worth = np.full(trace.layers * trace.experts, -NEVER)
    offsets = np.arange(trace.layers) * trace.experts
    cache = _Slots(slots, worth)
    hits = np.zeros(trace.steps, np.int64)
    for step in range(trace.steps):
        for layer in range(trace.layers):
            wanted = trace.ids[step, layer] + offsets[layer]
            worth[wanted] = -following[step, layer]
            hits[step] += cache.use(wanted)
    return hits


def _next_uses(trace: Trace) -> Array:
    """int64 [steps, layers, k]: when, in layers of steps, an expert is used next."""
    following = np.empty(trace.ids.shape, np.int64)
    upcoming = np.full((trace.layers, trace.experts), NEVER)
    layer = np.arange(trace.layers)[:, None]
    for step in range(trace.steps - 1, -1, -1):
        following[step] = upcoming[layer, trace.ids[step]]
        upcoming[layer, trace.ids[step]] = step * trace.layers + layer
    return following


class _Slots:
    """`worth` [L * E] is the caller's, who changes it in place; the least worth goes first."""

    def __init__(self, slots: int, worth: Array) -> None:
        self.worth = worth
        self.place = np.full(len(worth), -1, np.int64)
        self.keys = np.full(slots, -1, np.int64)
        self.filled = 0

    def use(self, wanted: Array) -> int:
        """Looks distinct experts up, takes in the missing, gives the number of hits."""
        places = self.place[wanted]
        missing = wanted[places < 0]
        room = min(len(self.keys) - self.filled, len(missing))
        victims = self._victims(places[places >= 0], len(missing) - room)
        slots = [*range(self.filled, self.filled + room), *victims]
        self.filled += room
        for key, slot in zip(missing.tolist(), slots, strict=False):
            if self.keys[slot] >= 0:
                self.place[self.keys[slot]] = -1
            self.keys[slot] = key
            self.place[key] = slot
        return len(wanted) - len(missing)

    def _victims(self, busy: Array, count: int) -> list[int]:
        """At most `count` full slots of the least worth, none of them busy."""
        candidates = np.setdiff1d(np.arange(self.filled), busy, assume_unique=True) if count > 0 else busy[:0]
        values = self.worth[self.keys[candidates]]
        if 0 < count < len(candidates):
            candidates = candidates[np.argpartition(values, count - 1)[:count]]
        return [int(slot) for slot in candidates]


_RULES: dict[str, Callable[[Trace, int], Array]] = {"lru": _lru, "aged": _aged, "belady": _belady}
