"""Host memory of the tiers that a GPU copies to and from by itself, pinned as far as it is used.

While the driver pins, no other thread can launch anything or see that a step has ended, and kernels that read host
memory stand still: windows of 64 MiB whose pages the system had still to give held up decoding for 11 to 26 ms each, of
8 MiB, touched before, for 2 to 10; of 1 MiB for 1 to 3, but for up to 148 where experts crossed the link all the time
(H200). So nothing is pinned while steps are computed. What is used meanwhile goes another way (bounce.py) and is pinned
when the engine rests; what is never used stays the system's. Where pinning is refused everything goes that way, at a
fraction of the rate.
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

WINDOW = 8 << 20  # bytes pinned at a time, in about half a millisecond
BREATH_SECONDS = 2e-4  # after a window, for a step to be launched


class Outcome(Protocol):
    """Of pinning: memory that is pinned until `close`, or a refusal that has a `reason` (a clause)."""

    @property
    def nbytes(self) -> int: ...


Pin = Callable[[torch.Tensor], Outcome]


class PinnedWindows:
    """busy: steps are computed. The step loop sets it, and reads `nbytes`; all else is called by one thread."""

    def __init__(self, arena: Arena, pin: Pin | None, window: int = WINDOW) -> None:
        self._memory = arena.memory
        self._pin = pin
        self._window = window
        self._pinned: dict[int, Outcome] = {}
        self._put_off: set[int] = set()  # windows that are used and not pinned yet
        self.busy = False
        self.refused = "" if pin is not None else "nothing pins it"

    @property
    def nbytes(self) -> int:
        return sum(outcome.nbytes for outcome in list(self._pinned.values()))  # at once: more may come meanwhile

    def pieces(self, view: Bytes) -> list[Bytes]:
        """The view cut where one window ends: a copy must not reach from pinned memory into other one.

        Pins them unless the engine is busy; then they are put off.
        """
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

    def direct(self, piece: Bytes) -> bool:
        """Whether one of those pieces is pinned."""
        begin = piece.ctypes.data - self._memory.ctypes.data
        return 0 <= begin < self._memory.size and begin // self._window in self._pinned

    @property
    def behind(self) -> bool:
        """There are windows to be pinned that were put off."""
        return bool(self._put_off)

    def catch_up(self) -> None:
        """Pins one of them, if the engine rests."""
        if self._put_off and not self.busy:
            self._reach(self._put_off.pop())

    def close(self) -> None:
        for outcome in self._pinned.values():
            close = getattr(outcome, "close", None)
            if close is not None:
                close()
        self._pinned.clear()

    def _reach(self, window: int) -> None:
        if self._pin is None or self.refused or window in self._pinned:
            return
        if self.busy:
            self._put_off.add(window)
            return
        self._put_off.discard(window)
        memory = self._memory[window * self._window : (window + 1) * self._window]
        touch(memory)
        outcome = self._pin(torch.from_numpy(memory))
        time.sleep(BREATH_SECONDS)
        reason = getattr(outcome, "reason", None)
        if reason is None:
            self._pinned[window] = outcome
        else:
            self.refused = str(reason)
            self._put_off.clear()
            log.warning("prompts in host memory are copied the slower way from here on: %s", reason)


def touch(memory: Bytes) -> None:
    """Has the system give every page of it, without a change of what it holds and without the interpreter's lock."""
    places = memory[:: mmap.PAGESIZE]
    np.bitwise_or(places, 0, out=places)
