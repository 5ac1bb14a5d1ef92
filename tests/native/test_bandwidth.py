"""Reading memory takes the time it takes, also where the threads that read lose their cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

_native = pytest.importorskip("ftengine._native", reason="the native library is not built")

BYTES, PASSES = 32 << 20, 200
FASTEST = 3e12  # bytes a second: more than any host's memory and caches


def test_no_pass_is_shorter_than_it_was() -> None:
    """As many other threads as CPUs keep the readers waiting; the shortest pass is what bandwidths are told by."""
    data = bytearray(b"\1" * BYTES)
    threads = max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(threads)]
    ended = threading.Timer(30, lambda: [process.kill() for process in busy])  # whatever becomes of this test
    ended.start()
    try:
        shortest = min(_native.read_seconds(data, threads, 0) for _ in range(PASSES))
    finally:
        ended.cancel()
        for process in busy:
            process.kill()
            process.wait()
    assert BYTES / shortest < FASTEST
