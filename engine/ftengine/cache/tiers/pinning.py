"""Host memory of the tiers that a GPU copies to and from by itself, pinned as far as it is used.

A window is pinned when the first record comes to lie in it: what is never used stays the system's. Where pinning is
refused copies go through the driver's own buffers, at about half the rate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from ftengine.cache.tiers.arena import Arena, Bytes

log = logging.getLogger(__name__)

WINDOW = 64 << 20  # bytes pinned at a time, in about 4 ms


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
        outcome = self._pin(torch.from_numpy(memory))
        reason = getattr(outcome, "reason", None)
        if reason is None:
            self._pinned[window] = outcome
        else:
            self.refused = str(reason)
            log.warning("prompts in host memory are copied the slower way from here on: %s", reason)
