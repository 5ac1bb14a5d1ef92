"""Blocks of host memory: never two in one place, whatever is moved; contents stay with their block."""

from __future__ import annotations

import mmap
import random
import struct
import sys

import numpy as np
import pytest
import torch

from ftengine.cache.tiers.arena import Arena, Block
from ftengine.cache.tiers.pinning import PinnedWindows

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("seed", range(5))
def test_random_use(seed: int) -> None:
    """Against a dict of what was written. Whatever is free in sum can be had while nothing is held."""
    chance = random.Random(seed)
    arena = Arena(1 << 20)
    held: dict[Block, int] = {}
    for number in range(1500):
        if held and chance.random() < 0.45:
            block = chance.choice(list(held))
            assert (arena.bytes_of(block) == held.pop(block)).all()
            arena.free(block)
        else:
            size = chance.choice([61 << 10, 10 << 10, chance.randrange(1, 10 << 10)])
            room = arena.size - arena.used
            block = arena.allocate(size)
            assert (block is not None) == (-(-size // 256) * 256 <= room)
            if block is not None:
                arena.bytes_of(block)[:] = number % 251
                held[block] = number % 251
        arena.check()
    for block, value in held.items():
        assert (arena.bytes_of(block) == value).all()
    assert arena.moved


def test_held_blocks_stay() -> None:
    arena = Arena(10 * 256)
    blocks = [arena.allocate(256) for _ in range(10)]
    offsets = [block.offset for block in blocks if block is not None]
    for block in blocks[::2]:
        assert block is not None
        arena.free(block)
    for block in blocks[1::2]:
        assert block is not None
        block.holds = 1
    assert arena.allocate(512) is None
    assert [block.offset for block in blocks if block is not None] == offsets
    assert blocks[5] is not None
    blocks[5].holds = 0
    block = arena.allocate(512)
    assert block is not None
    arena.check()


def test_all_or_none() -> None:
    arena = Arena(1024)
    assert arena.allocate_all([512, 512, 1]) is None
    assert arena.used == 0
    blocks = arena.allocate_all([512, 256])
    assert blocks is not None
    arena.free(blocks[0])
    with pytest.raises(ValueError, match="twice"):
        arena.free(blocks[0])


class Pinning:
    """Stands for the driver: refuses after some calls."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.calls: list[tuple[int, int]] = []
        self.closed = 0

    def __call__(self, tensor: torch.Tensor) -> Pinning.Outcome:
        self.calls.append((tensor.data_ptr(), tensor.nbytes))
        return self.Outcome(self, tensor.nbytes, None if len(self.calls) <= self.allowed else "no more of it")

    class Outcome:
        def __init__(self, owner: Pinning, nbytes: int, reason: str | None) -> None:
            self.owner, self.nbytes = owner, nbytes
            if reason is not None:
                self.reason = reason

        def close(self) -> None:
            self.owner.closed += 1


def test_windows_are_pinned_as_they_are_used(caplog: pytest.LogCaptureFixture) -> None:
    arena, pinning = Arena(10 * 4096 + 256), Pinning(2)
    windows = PinnedWindows(arena, pinning, window=4096)
    begin = arena.memory.ctypes.data
    pieces = windows.pieces(arena.memory[4000:9000])
    assert [piece.size for piece in pieces] == [96, 4096, 808]
    assert np.concatenate(pieces).ctypes.data != begin
    assert [piece.ctypes.data - begin for piece in pieces] == [4000, 4096, 8192]
    assert [(address - begin, size) for address, size in pinning.calls] == [(0, 4096), (4096, 4096), (8192, 4096)]
    windows.pieces(arena.memory[-300:])
    assert len(pinning.calls) == 3, "a refusal is asked for again"
    assert caplog.text.count("no more of it") == 1
    assert windows.nbytes == 2 * 4096
    outside = np.zeros(10, np.uint8)
    assert windows.pieces(outside)[0] is outside
    windows.close()
    assert pinning.closed == 2


def test_nothing_is_pinned_while_steps_are_computed() -> None:
    """What is used meanwhile is not copied to directly, and pinned when there is time; the rest never."""
    arena, pinning = Arena(8 * 4096), Pinning(9)
    windows = PinnedWindows(arena, pinning, window=4096)
    (first,) = windows.pieces(arena.memory[:100])
    windows.busy = True
    second, third = windows.pieces(arena.memory[8000:9000])
    assert [windows.direct(piece) for piece in (first, second, third, np.zeros(3, np.uint8))] == [True, *3 * [False]]
    windows.catch_up()
    assert len(pinning.calls) == 1
    assert windows.behind
    windows.busy = False
    windows.pieces(arena.memory[9000:9010])  # there is time: at once
    assert len(pinning.calls) == 2
    windows.catch_up()
    windows.catch_up()
    assert not windows.behind
    assert sorted((address - arena.memory.ctypes.data) // 4096 for address, _ in pinning.calls) == [0, 1, 2]
    assert windows.direct(second)
    assert windows.direct(third)


def test_what_was_put_off_is_forgotten_once_it_is_refused() -> None:
    arena = Arena(8 * 4096)
    windows = PinnedWindows(arena, Pinning(0), window=4096)
    windows.busy = True
    windows.pieces(arena.memory)
    windows.busy = False
    windows.catch_up()
    assert windows.refused == "no more of it"
    assert not windows.behind
    windows.busy = True
    windows.pieces(arena.memory)
    assert not windows.behind


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/pagemap is Linux's")
def test_pages_are_there_before_they_are_pinned() -> None:
    """The driver would wait for them, and every step with it."""
    arena = Arena(64 * PAGE)
    arena.memory[PAGE + 5] = 7
    seen: list[list[bool]] = []

    def pin(tensor: torch.Tensor) -> Pinning.Outcome:
        seen.append(present(tensor.data_ptr(), tensor.nbytes // PAGE))
        return Pinning(1)(tensor)

    windows = PinnedWindows(arena, pin, window=32 * PAGE)
    windows.pieces(arena.memory[33 * PAGE : 34 * PAGE])
    windows.pieces(arena.memory[:10])
    assert seen == [[True] * 32] * 2
    assert arena.memory[PAGE + 5] == 7
    assert arena.memory.sum() == 7


def present(address: int, pages: int) -> list[bool]:
    """Bit 63 of the kernel's pagemap (Documentation/admin-guide/mm/pagemap.rst)."""
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        table.seek(address // PAGE * 8)
        return [bool(word >> 63) for word in struct.unpack(f"={pages}Q", table.read(8 * pages))]
