"""Host memory of the tiers that a GPU copies to and from by itself, pinned as far as it is used.

A window is pinned when the first record comes to lie in it: what is never used stays the system's. Where pinning is
refused copies go through the driver's own buffers, at about half the rate.

While the driver pins, no other thread can launch anything or see that a step has ended: windows of 64 MiB whose pages
the system had still to give and to clear held up decoding for 11 to 26 ms each, and of 8 MiB, touched before, for 2.4
to 10 (H200, 14 threads of experts beside it). So pages are touched before, and windows are small.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from ftengine.cache.tiers.arena import Arena, Bytes

log = logging.getLogger(__name__)

WINDOW = 1 << 20  # bytes pinned at a time, in about 0.3 ms
BREATH_SECONDS = 2e-4  # after a window, for a step to be launched or ended


class Outcome(Protocol):
    """Of pinning: memory that is pinned until `close`, or a refusal that has a `reason` (a clause)."""

    @property
    def nbytes(self) -> int: ...


Pin = Callable[[torch.Tensor], Outcome]


class PinnedWindows:
    def __init__(self, arena: Arena, pin: Pin | None, window: int = WINDOW) -> None:
        self._memory = arena.memory
        self._pin = pin
        self._window = window
        self._pinned: dict[int, Outcome] = {}
        self.refused = "" if pin is not None else "nothing pins it"

    @property
    def nbytes(self) -> int:
        return sum(outcome.nbytes for outcome in self._pinned.values())

    def pieces(self, view: Bytes) -> list[Bytes]:
        """The view cut where one pinned window ends: a copy must not reach from one into the next."""
        begin = view.ctypes.data - self._memory.ctypes.data
        if not view.size or not 0 <= begin < self._memory.size:
            return [view]
        cut: list[Bytes] = []
        done = 0
        while done < view.size:
            window = (begin + done) // self._window
            self._reach(window)
            end = min(view.size, (window + 1) * self._window - begin)
            cut.append(view[done:end])
            done = end
        return cut

    def close(self) -> None:
        for outcome in self._pinned.values():
            close = getattr(outcome, "close", None)
            if close is not None:
                close()
        self._pinned.clear()

    def _reach(self, window: int) -> None:
        if self._pin is None or self.refused or window in self._pinned:
            return
        memory = self._memory[window * self._window : (window + 1) * self._window]
        touch(memory)
        outcome = self._pin(torch.from_numpy(memory))
        time.sleep(BREATH_SECONDS)
        reason = getattr(outcome, "reason", None)
        if reason is None:
            self._pinned[window] = outcome
        else:
            self.refused = str(reason)
            log.warning("prompts in host memory are copied the slower way from here on: %s", reason)


def touch(memory: Bytes) -> None:
    """Has the system give every page of it, without a change of what it holds and without the interpreter's lock."""
    places = memory[:: mmap.PAGESIZE]
    np.bitwise_or(places, 0, out=places)
