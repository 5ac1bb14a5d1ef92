"""Random streams of all that can happen to sequences, against plain lists of what was computed and kept.

`compute` compares every page and state that a sequence goes on from with what a cold run would have there.
"""

from __future__ import annotations

import random
from itertools import takewhile

import pytest

from ftengine.cache import sequences
from ftengine.cache.sequences import SequenceCache
from ftengine.core import Boundary, BoundaryKind, Request, SamplingParams, Sequence
from tests.cache.fake_tiers import FakeTiers
from tests.cache.plain import compute, make_cache

KINDS = list(BoundaryKind)


def common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Stream:
    """Sequences that come, compute, and go; `paths` are all that were ever computed."""

    def __init__(self, cache: SequenceCache, seed: int, tiers: FakeTiers | None = None) -> None:
        self.cache = cache
        self.chance = random.Random(seed)
        self.tiers = tiers
        self.running: list[Sequence] = []
        self.paths: list[list[int]] = []
        self.restored = 0

    def new(self) -> Sequence:
        chance = self.chance
        stem = []
        if self.paths and chance.random() < 0.9:
            stem = chance.choice(self.paths[-15:])[:70]
            stem = stem[: chance.randrange(len(stem) + 1)] if chance.random() < 0.4 else stem
        tokens = [*stem, *(chance.randrange(3) for _ in range(chance.randrange(1, 20)))]
        places = sorted(chance.sample(range(1, len(tokens) + 1), min(len(tokens), chance.randrange(6))))
        request = Request(
            "r",
            tokens,
            SamplingParams(1),
            boundaries=[Boundary(at, chance.choice(KINDS)) for at in places],
            boundary_tokens=(2,) if chance.random() < 0.5 else (),
            session=chance.choice(["", "a", "b"]),
            side=chance.random() < 0.3,
        )
        return Sequence(request, list(tokens))

    def ready(self) -> list[Sequence]:
        return [sequence for sequence in self.running if not self.cache.restoring(sequence)]

    def act(self, *, most: int) -> None:
        chance, ready = self.chance, self.ready()
        action = chance.random()
        if action < 0.3 and len(self.running) < most:
            sequence = self.new()
            if self.cache.admit(sequence, headroom=len(self.running)):
                self.running.append(sequence)
        elif action < 0.75 and ready:
            self.go_on(chance.choice(ready))
        elif action < 0.9 and self.running:
            self.end(chance.choice(self.running))
        elif action > 0.98:
            self.cache.store.clear()
        if self.tiers is not None and chance.random() < 0.4:
            self.tiers.pump(chance.randrange(1, 4))
        self.tick()
        self.cache.check_integrity(self.running)

    def go_on(self, sequence: Sequence) -> None:
        left = len(sequence.tokens) - sequence.computed
        if left > 0:
            compute(self.cache, sequence, self.chance.randint(1, left))
        else:
            sequence.tokens.append(self.chance.randrange(3))
            if self.cache.reserve(sequence, len(sequence.tokens)):
                compute(self.cache, sequence, 1)
            else:
                sequence.tokens.pop()
        self.paths.append(sequence.tokens[: sequence.computed])

    def end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        fault = self.chance.random()
        if fault < 0.2 and not self.cache.restoring(sequence) and sequence.computed < len(sequence.tokens):
            self.cache.plan(sequence, len(sequence.tokens))  # a step that fails, before or after it was planned
        self.cache.release(sequence, keep=fault > 0.05, halfway=fault < 0.2)

    def tick(self) -> None:
        for sequence, there in self.cache.tick():
            self.restored += there
            if not there:
                assert sequence.pages == []
                self.running.remove(sequence)
                if self.cache.admit(sequence, headroom=len(self.running)):
                    self.running.append(sequence)

    def finish(self) -> None:
        for sequence in list(self.running):
            self.running.remove(sequence)
            self.cache.release(sequence)
        while self.cache.copying:  # one that was left while it was restored may be kept when that has ended
            self.tiers.pump(10_000)
            self.tick()
        self.cache.check_integrity([])
        self.cache.check_idle()
        self.cache.clear()
        assert self.cache.pages.used_count == self.cache.slots.used_count == self.cache.tree.size == 0


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
@pytest.mark.parametrize("tiers", [False, True], ids=["device", "tiers"])
@pytest.mark.parametrize(("pages", "slots", "most"), [(30, 6, 3), (60, 12, 4), (25, 4, 4)])
def test_whatever_happens_what_is_reused_is_right(
    recurrent: bool, tiers: bool, pages: int, slots: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "LEAST_RESTORED", 4)
    cache = make_cache(pages, slots, spacing=7, recurrent=recurrent)
    if tiers:
        cache.tiers = FakeTiers(cache.tensors, failing=0.2, seed=pages)
    stream = Stream(cache, pages, cache.tiers if tiers else None)
    for _ in range(1500):
        stream.act(most=most)
    assert cache.reuse.hits > 25
    assert cache.page_evictions > 50 or (pages, recurrent) == (60, False)  # where there is room for nearly all
    assert stream.restored > 5 or not tiers
    stream.finish()


@pytest.mark.parametrize("seed", range(4))
def test_with_room_for_all_everything_is_found(seed: int) -> None:
    """Attention: the longest common prefix with anything computed, but for the tokens of pages that were not left."""
    cache = make_cache(4000, 400, recurrent=False)
    stream = Stream(cache, seed)
    for _ in range(120):
        sequence = stream.new()
        expected = max((common(path, sequence.tokens[:-1]) for path in stream.paths), default=0)
        assert cache.admit(sequence)
        assert sequence.computed == expected
        compute(cache, sequence, len(sequence.tokens) - expected)
        cache.release(sequence)
        stream.paths.append(list(sequence.tokens))
    cache.check_integrity([])


@pytest.mark.parametrize("seed", range(4))
def test_with_room_for_all_every_state_that_was_asked_for_is_found(seed: int) -> None:
    """Recurrent: the deepest place among boundaries, last tokens and ends of what was computed before."""
    cache = make_cache(4000, 1000, spacing=10_000)
    stream, kept = Stream(cache, seed), [[]]
    for _ in range(120):
        sequence = stream.new()
        tokens = sequence.tokens
        expected = max(len(path) for path in kept if path == tokens[: len(path)] and len(path) < len(tokens))
        assert cache.admit(sequence)
        assert sequence.computed == expected
        while sequence.computed < len(tokens):
            start = sequence.computed
            compute(cache, sequence, stream.chance.randint(1, len(tokens) - start))
            if sequence.computed - start > 1:  # one token alone is a decode step to the model
                places = [*(each.position for each in sequence.request.boundaries), len(tokens) - 1]
                wanted = (at for at in places if start < at <= min(sequence.computed, len(tokens) - 1))
                kept += [tokens[:at] for at in wanted]
        cache.release(sequence)
        kept.append(list(tokens))
        stream.paths.append(list(tokens))
    cache.check_integrity([])
