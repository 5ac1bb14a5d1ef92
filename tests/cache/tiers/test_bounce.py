"""Copies through a little pinned memory, against plain ones. The GPU's side is a double: tensors whose copies happen no
sooner than somebody waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ftengine.cache.tiers import mover
from ftengine.cache.tiers.arena import Arena
from ftengine.cache.tiers.bounce import Bounce
from ftengine.cache.tiers.mover import CudaMover, HostMover
from ftengine.cache.tiers.pinning import PinnedWindows
from ftengine.cache.tiers.shape import RecordShape
from tests.cache.tiers.device import HYBRID, PAGE, Device


class Queue:
    """Copies that were asked for and have not happened."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        for copy in self.copies:
            copy()
        self.copies.clear()

    def late(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, and its parts, as what a GPU copies from or to."""
        queue = self

        class Late(torch.Tensor):
            def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
                assert non_blocking
                queue.copies.append(lambda: torch.Tensor.copy_(self, source))
                return self

        return tensor.as_subclass(Late)


def numbers(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [1, 64, 65, 640, 1000])
def test_what_is_saved_arrives(size: int) -> None:
    queue, expected = Queue(), numbers(size, 1)
    bounce = Bounce(queue.late(torch.zeros(64, dtype=torch.uint8)), queue.wait)
    host = np.zeros(size + 7, np.uint8)
    bounce.save(torch.from_numpy(expected.copy()), host[:size])
    bounce.save(torch.from_numpy(expected[:7].copy()), host[size:])
    bounce.flush()
    assert host.tolist() == [*expected, *expected[:7]] if size >= 7 else host[:size].tolist() == expected.tolist()
    assert not queue.copies


@pytest.mark.parametrize("size", [1, 64, 65, 640, 1000])
def test_what_is_loaded_arrives_though_its_source_changes(size: int) -> None:
    queue, expected = Queue(), numbers(size, 2)
    bounce = Bounce(torch.zeros(64, dtype=torch.uint8), queue.wait)
    device, host = torch.zeros(size, dtype=torch.uint8), expected.copy()
    bounce.load(host, queue.late(device))
    host[:] = 0
    bounce.flush()
    assert device.numpy().tolist() == expected.tolist()


def test_what_failed_is_written_nowhere() -> None:
    """Its host memory may be another record's by then; the next copies are not mixed up with it."""
    queue, host = Queue(), np.zeros(16, np.uint8)
    bounce = Bounce(queue.late(torch.zeros(64, dtype=torch.uint8)), queue.wait)
    bounce.save(torch.ones(16, dtype=torch.uint8), host)
    bounce.drop()
    assert not queue.copies, "the device still writes where the next copy goes"
    bounce.save(torch.full((8,), 2, dtype=torch.uint8), host[8:])
    bounce.flush()
    assert host.tolist() == [*8 * [0], *8 * [2]]


class Stream:
    def wait_event(self, event: Any) -> None:
        pass


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def record(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        self.queue.wait()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A CUDA without a GPU: enough of it for CudaMover."""
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(queue))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(mover, "_pinned", lambda size: queue.late(torch.zeros(size, dtype=torch.uint8)))
    monkeypatch.setattr(mover, "BOUNCE_BYTES", 96)
    return queue


@pytest.mark.parametrize("pinned", ["all", "none", "some"])
def test_a_record_is_the_same_whatever_is_pinned(pinned: str, queue: Queue) -> None:
    """Saved and loaded by CudaMover, against HostMover."""
    device, other = (Device(HYBRID, 4, PAGE, "cpu") for _ in range(2))
    tokens = list(range(100, 100 + 2 * PAGE + 5))
    device.fill(tokens, [2, 0], 4, 3)
    parts = [part for pair in zip(device.tensors.keys, device.tensors.values, strict=True) for part in pair]
    states = [state for layer in device.tensors.states for state in layer.values()]
    shape = RecordShape.of(HYBRID)
    arena = Arena(1 << 16)
    windows = PinnedWindows(arena, Pin(), window=256)
    windows.busy = True
    if pinned != "none":
        windows.busy = False
        windows.pieces(arena.memory if pinned == "all" else arena.memory[600:1200])
        windows.busy = True
    slots = mover.slots_of([2, 0], 4, len(tokens), PAGE)
    size = len(slots) * shape.token_bytes
    blocks = [arena.memory[:size], arena.memory[1 << 15 :][: shape.state_bytes]]
    host = HostMover(parts, states, shape, PAGE)
    expected = [np.zeros_like(block) for block in blocks]
    host.save_tokens(slots, expected[0])
    host.save_state(3, expected[1])
    ours = CudaMover(parts, states, shape, windows)
    ours.begin(None)
    ours.save_tokens(slots, blocks[0])
    ours.save_state(3, blocks[1])
    ours.finish()
    assert all((block == other).all() for block, other in zip(blocks, expected, strict=True))

    there = [part for pair in zip(other.tensors.keys, other.tensors.values, strict=True) for part in pair]
    states_there = [state for layer in other.tensors.states for state in layer.values()]
    ours = CudaMover(there, states_there, shape, windows)
    ours.begin(None)
    ours.load_tokens(slots, blocks[0], 0, len(slots))
    ours.load_state(3, blocks[1])
    ours.finish()
    again = [np.zeros_like(block) for block in blocks]
    host = HostMover(there, states_there, shape, PAGE)
    host.save_tokens(slots, again[0])
    host.save_state(3, again[1])
    assert all((block == other).all() for block, other in zip(again, expected, strict=True))
    assert queue.waits >= 2
    ours.close()


class Pin:
    def __call__(self, tensor: torch.Tensor) -> Pin:
        self.nbytes = tensor.nbytes
        return self

    def close(self) -> None:
        pass
