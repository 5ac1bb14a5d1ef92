"""Reads ranges of files into memory before they are asked for, while something else keeps the caller. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ftengine.weights.ranges import Bytes, RangeReader, aligned_bytes, finish

# Of one system call, if the page cache has them: between two of them a thread must have the interpreter, which an
# import keeps for long. What is begun is read to its end: 16 threads, on a disk of 250 MB/s, within a second.
STEP_BYTES = 16 << 20


@dataclass(frozen=True)
class _Begun:
    number: int  # of the file
    memory: Bytes
    steps: list[Future[None]]


class ReadAhead:
    """Ranges that were begun, by a key each, read in the order of `begin` until they are taken. Threads of its own:
    what `reader` is asked for meanwhile does not wait behind them. Safe to call from several threads.
    """

    def __init__(self, reader: RangeReader) -> None:
        """reader: to be closed after this."""
        self._reader = reader
        self._pool = ThreadPoolExecutor(reader.threads, thread_name_prefix="ahead")
        self._begun: dict[Hashable, _Begun] = {}
        self._lock = threading.Lock()

    def begin(self, key: Hashable, number: int, offset: int, size: int) -> None:
        """Of file `number` of the reader. Raises MemoryError."""
        memory, steps = aligned_bytes(size), list[Future[None]]()
        for at in range(0, size, STEP_BYTES):
            steps.append(self._pool.submit(self._reader.fill, number, offset + at, memory[at : at + STEP_BYTES]))
        with self._lock:
            self._begun[key] = _Begun(number, memory, steps)

    def memory(self, key: Hashable) -> Bytes | None:
        """Where the range is read to; None if it was not begun, or is taken."""
        with self._lock:
            begun = self._begun.get(key)
        return None if begun is None else begun.memory

    def take(self, key: Hashable) -> Bytes | None:
        """Waits for the range, which is the caller's from then on; None as of `memory`.

        Raises CheckpointError as RangeReader.read does.
        """
        with self._lock:
            begun = self._begun.pop(key, None)
        if begun is None:
            return None
        finish(begun.steps)
        self._reader.check(begun.number)
        return begun.memory

    def read_bytes(self) -> int:
        """Of ranges that are not taken, what has been read up to now."""
        with self._lock:
            begun = list(self._begun.values())
        return sum(
            min(STEP_BYTES, one.memory.size - at * STEP_BYTES)
            for one in begun
            for at, step in enumerate(one.steps)
            if step.done() and step.exception() is None
        )

    def close(self) -> None:
        """Nothing is read any more when it returns, and memory that nobody took is given back. Again is no error.

        Whoever waits in `take` gets a CancelledError.
        """
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._begun.clear()
