"""What would hold up steps is done while the engine rests."""

from __future__ import annotations

import threading
import time

import torch

from ftengine.cache.sessions import Sessions
from ftengine.cache.tiers.arena import Arena
from ftengine.cache.tiers.open import open_tiers
from ftengine.cache.tiers.pinning import PinnedWindows
from ftengine.cache.tiers.worker import Worker
from tests.cache.tiers.device import HYBRID, IDENTITY, PAGE, Device, until


class Pin:
    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []

    def __call__(self, tensor: torch.Tensor) -> Pin:
        self.calls.append((time.monotonic(), tensor.nbytes))
        return self

    @property
    def nbytes(self) -> int:
        return self.calls[-1][1]

    def close(self) -> None:
        pass


def test_windows_are_pinned_between_requests_only() -> None:
    device, pin = Device(HYBRID, 8, PAGE, "cpu"), Pin()
    tiers = open_tiers(
        tensors=device.tensors, layout=HYBRID, sessions=Sessions(), host_bytes=64 << 20, disk_bytes=0, folder=None,
        identity=IDENTITY, pin=pin,
    )  # fmt: skip
    assert tiers is not None
    windows, memory = tiers._windows, tiers._books.arena.memory
    tiers.rest(False)
    windows.pieces(memory[: 20 << 20])  # as a transfer to a GPU would
    tiers._worker.nudge()
    time.sleep(0.05)
    assert windows.behind
    assert not pin.calls
    tiers.rest(True)
    until(lambda: len(pin.calls) == 3)
    assert not windows.behind
    tiers.rest(False)
    windows.pieces(memory)
    tiers._worker.nudge()
    time.sleep(0.05)
    assert len(pin.calls) == 3
    tiers.close(60.0)


def test_a_job_comes_before_what_is_done_meanwhile() -> None:
    """One piece of it at a time; it goes on afterwards until there is no more."""
    done: list[str] = []
    put = threading.Event()

    def meanwhile() -> bool:
        if len(done) == 2:
            assert put.wait(60)
        done.append("piece")
        return len(done) < 12

    worker = Worker(lambda: None, meanwhile)
    worker.start()
    worker.nudge()
    until(lambda: len(done) == 2)
    worker.put(lambda: done.append("job"))
    put.set()
    until(lambda: len(done) >= 12)
    time.sleep(0.05)
    assert done.index("job") == 3  # after the piece that was being done
    assert done.count("piece") == 11
    assert len(done) == 12
    worker.close(60.0)
    assert worker.ended


def test_a_worker_with_nothing_to_do_sleeps() -> None:
    calls: list[float] = []
    worker = Worker(lambda: None, lambda: bool(calls.append(0.0)))
    worker.start()
    worker.nudge()
    until(lambda: calls)
    time.sleep(0.2)
    assert len(calls) <= 2
    worker.close(60.0)


def test_nothing_is_put_off_where_nothing_pins() -> None:
    arena = Arena(1 << 16)
    windows = PinnedWindows(arena, None)
    windows.busy = True
    windows.pieces(arena.memory)
    assert not windows.behind


def test_what_is_pinned_can_be_asked_while_more_is_being_pinned() -> None:
    """The step loop asks, and the tiers' thread may get the interpreter at any place: here between two windows."""
    arena = Arena(1 << 16)

    class Growing:
        """Of one page. Whoever asks for its size finds another window pinned afterwards."""

        @property
        def nbytes(self) -> int:
            windows._reach(len(windows._pinned))
            return 4096

    windows = PinnedWindows(arena, lambda tensor: Growing(), window=4096)
    windows.pieces(arena.memory[:8192])
    assert windows.nbytes == 2 * 4096
    assert windows.nbytes == 4 * 4096
