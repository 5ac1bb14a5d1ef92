"""A cache without a model: what is stored is written here, and what is restored is compared with its tokens.

A page's keys hold the tokens they are of, a state the count of tokens and a sum over them, as a cold run has them.
"""

from __future__ import annotations

import torch

from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache
from ftengine.core import Boundary, BoundaryKind, CacheLayout, Request, SamplingParams, Sequence, StateSpec

PAGE = 4


def make_cache(
    pages: int = 16, slots: int = 8, spacing: int = 8, *, recurrent: bool = True, **options
) -> SequenceCache:
    states = ((StateSpec("s", (2,), "float64"),),) if recurrent else ()
    layout = CacheLayout(1, 1, 1, "float64", states)
    return SequenceCache(allocate_cache(layout, pages, PAGE, slots), pages, slots, spacing=spacing, **options)


def make_sequence(tokens: list[int], boundaries: dict[int, BoundaryKind] | None = None, **options) -> Sequence:
    places = [Boundary(at, kind) for at, kind in (boundaries or {}).items()]
    request = Request("r", list(tokens), SamplingParams(max_tokens=1), boundaries=places, **options)
    return Sequence(request, list(tokens))


def state_of(tokens: list[int]) -> torch.Tensor:
    return torch.tensor([len(tokens), sum(token * (at + 1) for at, token in enumerate(tokens))], dtype=torch.float64)


def compute(cache: SequenceCache, sequence: Sequence, count: int) -> None:
    """As a model would. Fails if pages or state are not those of the tokens that count as computed."""
    end, captures = cache.plan(sequence, sequence.computed + count)
    keys, tokens, start = cache.tensors.keys[0], sequence.tokens, sequence.computed
    for at in range(start):
        assert keys[sequence.pages[at // PAGE], at % PAGE] == tokens[at], f"the page of token {at} is not its own"
    if cache.has_state:
        state = cache.tensors.states[0]["s"]
        if start == 0:
            state[sequence.state_slot] = 0
        assert state[sequence.state_slot].equal(state_of(tokens[:start])), "the state is not that of the tokens"
        state[sequence.state_slot] = state_of(tokens[:end])
        for planned in captures:
            assert start < planned.position <= end
            state[planned.slot] = state_of(tokens[: planned.position])
    for at in range(start, end):
        keys[sequence.pages[at // PAGE], at % PAGE] = tokens[at]
    sequence.computed = end
    cache.commit(sequence)


def decode(cache: SequenceCache, sequence: Sequence, tokens: list[int]) -> None:
    for token in tokens:
        sequence.tokens.append(token)
        assert cache.reserve(sequence, len(sequence.tokens))
        compute(cache, sequence, 1)


def ran(cache: SequenceCache, tokens: list[int], boundaries: dict[int, BoundaryKind] | None = None, **options) -> int:
    """Runs a prompt to its end, in one chunk; how much of it was there."""
    sequence = make_sequence(tokens, boundaries, **options)
    assert cache.admit(sequence)
    found = sequence.computed
    compute(cache, sequence, len(tokens) - found)
    cache.check_integrity([sequence])
    cache.release(sequence)
    cache.check_integrity([])
    return found
