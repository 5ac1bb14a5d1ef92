"""One recording of routing: taken from the device's ring in pieces, while the engine goes on."""

from __future__ import annotations

import numpy as np

from ftengine.experts.slots import SlotPool
from ftengine.experts.trace import Array, encode_trace, near_misses


class Recording:
    """Of the next `steps` decode steps. `advance` is called between steps, `stop` at any time."""

    def __init__(self, pool: SlotPool, steps: int) -> None:
        """Raises ValueError for a pool without room."""
        pool.start_trace()
        assert pool.tensors.trace is not None
        self.steps = steps
        self.taken = 0
        self._pool = pool
        self._room = len(pool.tensors.trace.ids)
        self._parts: list[tuple[Array, Array, Array]] = []

    def advance(self) -> bool:
        """Takes what was recorded, once the ring is half full. True: all steps are there, and the recording has ended.

        Waits for the device.
        """
        end = min(self._pool.traced(), self.steps)
        if end == self.steps:
            self.stop()
        if end == self.steps or end - self.taken >= self._room // 2:
            self._take(end)
        return end == self.steps

    def stop(self) -> None:
        self._pool.stop_trace()

    def encode(self) -> bytes:
        """The .npz of what was taken (experts/trace.py)."""
        ids, near, probabilities = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        return encode_trace(ids, near, probabilities, self._pool.experts)

    def _take(self, end: int) -> None:
        ids, logits = self._pool.trace_of(self.taken, end)
        self._parts.append((ids, *near_misses(ids, logits)))
        self.taken = end
