from __future__ import annotations

import random

import pytest

from ftengine.cache.pages import Allocator


def test_against_a_plain_set() -> None:
    """A thousand random steps: the books equal a set's, and the lowest free number is given."""
    allocator, used, choose = Allocator(20), set(), random.Random(1)
    for _ in range(1000):
        if used and (choose.random() < 0.5 or len(used) == 20):
            number = choose.choice(sorted(used))
            allocator.free(number)
            used.discard(number)
        else:
            number = allocator.allocate()
            assert number == min(set(range(20)) - used)
            used.add(number)
        assert allocator.in_use() == used
        assert (allocator.used_count, allocator.free_count) == (len(used), 20 - len(used))


def test_free_twice_and_allocate_from_nothing() -> None:
    allocator = Allocator(1)
    allocator.free(allocator.allocate())
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(0)
    allocator.allocate()
    with pytest.raises(IndexError):
        allocator.allocate()
