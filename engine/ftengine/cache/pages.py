"""Hands out page and slot numbers. Knows nothing of what lies in them."""

from __future__ import annotations

import heapq


class Allocator:
    """Numbers 0..count-1, each free or in use.

    The lowest free one goes first: pages of a sequence tend to be neighbours, which attention reads in place, and
    little memory is ever touched.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))  # a heap
        self._used = bytearray(count)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.count - len(self._free)

    def allocate(self) -> int:
        """Raises IndexError when nothing is free."""
        number = heapq.heappop(self._free)
        self._used[number] = 1
        return number

    def free(self, number: int) -> None:
        if not self._used[number]:
            raise ValueError(f"{number} is freed twice")
        self._used[number] = 0
        heapq.heappush(self._free, number)

    def in_use(self) -> set[int]:
        return {number for number, used in enumerate(self._used) if used}
