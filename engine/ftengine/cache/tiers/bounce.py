"""Copies between a device and host memory that is not pinned, through a little memory that is.

The driver would do that, too, by buffers of its own; but then every such copy holds up the thread that asks for it,
piece by piece. Here the device's part of the way is queued like any other copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from ftengine.cache.tiers.arena import Bytes


class Bounce:
    """Used by one thread. memory: uint8 [N], pinned; wait: returns when all copies queued so far are done."""

    def __init__(self, memory: torch.Tensor, wait: Callable[[], None]) -> None:
        self._memory = memory
        self._wait = wait
        self._used = 0
        self._owed: list[tuple[torch.Tensor, Bytes]] = []  # arrived, or on its way, and still to be copied on

    def save(self, device: torch.Tensor, host: Bytes) -> None:
        """host = device, both of as many bytes; in place after `flush`."""
        for own, begin, end in self._pieces(host.size):
            own.copy_(device[begin:end], non_blocking=True)
            self._owed.append((own, host[begin:end]))

    def load(self, host: Bytes, device: torch.Tensor) -> None:
        """device = host. `host` may change afterwards."""
        for own, begin, end in self._pieces(host.size):
            np.copyto(own.numpy(), host[begin:end])
            device[begin:end].copy_(own, non_blocking=True)

    def flush(self) -> None:
        """Waits for all copies that were queued, also for those that did not go this way."""
        self._wait()
        for own, host in self._owed:
            np.copyto(host, own.numpy())
        self._owed.clear()
        self._used = 0

    def drop(self) -> None:
        """After a failure: the host memory of what is owed may be somebody else's by now, and is not written."""
        if self._used:
            self._wait()
        self._owed.clear()
        self._used = 0

    def _pieces(self, size: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Memory, and which bytes go through it; where there is no more, what is there is brought to its end first."""
        begin = 0
        while begin < size:
            if self._used == len(self._memory):
                self.flush()
            count = min(size - begin, len(self._memory) - self._used)
            own = self._memory[self._used : self._used + count]
            self._used += count
            yield own, begin, begin + count
            begin += count
