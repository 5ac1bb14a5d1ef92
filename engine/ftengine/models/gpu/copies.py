"""The order of two streams that share two buffers: one fills a buffer while the other one works on the other buffer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Turns:
    """Turns 0, 1, 2, ... fill and use even and odd buffers. Without a GPU everything happens in program order."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._filled, self._used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Before turn 0: what fills comes after all that was launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """What is launched inside fills the turn's buffer; what is launched afterwards may use it."""
        if self._stream is None:
            yield
            return
        filled, used = self._filled[number % 2], self._used[number % 2]
        current = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            if number >= 2:
                self._stream.wait_event(used)
            yield
            filled.record(self._stream)
        current.wait_event(filled)

    def done(self, number: int) -> None:
        """The turn's buffer was used by what was launched so far."""
        if self._stream is not None:
            self._used[number % 2].record(torch.cuda.current_stream())
