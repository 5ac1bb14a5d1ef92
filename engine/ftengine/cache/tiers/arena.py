"""Host memory of a fixed size, handed out in contiguous blocks that may be moved together.

Records of two very different sizes share it, so holes that fit nothing would grow; moving blocks down makes one hole of
them. The system gives memory when it is first written to, so what was never used costs nothing.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ALIGN = 256  # bytes
HUGE = 2 << 20  # from here on large pages are asked for

Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Block:
    """size: as asked for. holds: transfers that use it; such a block is neither moved nor freed."""

    offset: int
    size: int
    holds: int = 0

    @property
    def extent(self) -> int:
        return _aligned(self.size)

    @property
    def end(self) -> int:
        return self.offset + self.extent


class Arena:
    """Not thread-safe: one lock of the tiers guards it. The bytes of a held block may be used outside that lock."""

    def __init__(self, size: int) -> None:
        """Raises MemoryError."""
        self.size = size // ALIGN * ALIGN
        self.used = 0
        self.moved = 0  # bytes, by compaction
        self._blocks: list[Block] = []  # by offset
        try:
            memory = mmap.mmap(-1, max(self.size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system gives no {size} bytes: {error.strerror}") from None
        if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without them
                pass
        self.memory: Bytes = np.frombuffer(memory, np.uint8, self.size)

    def bytes_of(self, block: Block) -> Bytes:
        return self.memory[block.offset : block.offset + block.size]

    def allocate(self, size: int) -> Block | None:
        """From the smallest hole that fits, after moving blocks together if that makes one; None: there is no room."""
        extent = _aligned(size)
        if extent > self.size - self.used:
            return None
        offset = self._hole(extent)
        if offset is None:
            self._compact(extent)
            offset = self._hole(extent)
            if offset is None:
                return None
        block = Block(offset, size)
        bisect.insort(self._blocks, block, key=lambda other: other.offset)
        self.used += extent
        return block

    def allocate_all(self, sizes: list[int]) -> list[Block] | None:
        """A block of each size, or none at all."""
        blocks: list[Block] = []
        for size in sizes:
            block = self.allocate(size)
            if block is None:
                for made in blocks:
                    self.free(made)
                return None
            blocks.append(block)
        return blocks

    def free(self, block: Block) -> None:
        assert not block.holds, "a block in use is freed"
        position = bisect.bisect_left(self._blocks, block.offset, key=lambda other: other.offset)
        if position == len(self._blocks) or self._blocks[position] is not block:
            raise ValueError("a block is freed twice")
        del self._blocks[position]
        self.used -= block.extent

    def check(self) -> None:
        """Raises AssertionError if blocks overlap, leave the arena or are counted wrongly."""
        assert self.used == sum(block.extent for block in self._blocks) <= self.size, "the arena's count is wrong"
        end = 0
        for block in self._blocks:
            assert block.offset >= end, "two blocks overlap"
            end = block.end
        assert end <= self.size, "a block leaves the arena"

    def _hole(self, extent: int) -> int | None:
        best: tuple[int, int] | None = None
        begin = 0
        for end, after in ((block.offset, block.end) for block in (*self._blocks, Block(self.size, 0))):
            if end - begin >= extent and (best is None or end - begin < best[0]):
                best = end - begin, begin
            begin = after
        return best and best[1]

    def _compact(self, extent: int) -> None:
        """Makes a hole of `extent` bytes where the fewest have to be moved for it; nothing if held blocks forbid it."""
        best: tuple[int, int, int] | None = None  # bytes to move, which blocks
        first, free, moved = 0, 0, 0
        edges = [(0, 0), *((block.offset, block.end) for block in self._blocks), (self.size, self.size)]
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(edges)]
        for last, gap in enumerate(gaps):  # the blocks from `first` to before `last` would be moved
            if last and self._blocks[last - 1].holds:
                first, free, moved = last, 0, 0
            elif last:
                moved += self._blocks[last - 1].extent
            free += gap
            while first < last and free - gaps[first] >= extent:
                free -= gaps[first]
                moved -= self._blocks[first].extent
                first += 1
            if free >= extent and (best is None or moved < best[0]):
                best = moved, first, last
        if best is None:
            return
        end = self._blocks[best[1] - 1].end if best[1] else 0
        for block in self._blocks[best[1] : best[2]]:
            if block.offset > end:
                self._move(block, end)
            end = block.end

    def _move(self, block: Block, offset: int) -> None:
        base = self.memory.ctypes.data
        ctypes.memmove(base + offset, base + block.offset, block.size)  # may overlap
        block.offset = offset
        self.moved += block.size


def _aligned(size: int) -> int:
    return -(-max(size, 1) // ALIGN) * ALIGN
