"""The engine's other threads beside those of the CPU's lane."""

from __future__ import annotations

import contextlib
import os
import threading

from ftengine.experts.lane import spare_cpus

LEAST = 2  # CPUs, of which the thread that launches steps needs one


def keep_off_cores(threads: int) -> set[int]:
    """The threads that Python has now, and those that they start, keep off the cores of a lane of so many threads.

    The lane computes a layer with a core for each of its threads: where another thread takes one of them for a time
    slice, to hash or to copy a prompt, the whole step waits for that. A single CPU is needed by the thread that
    launches steps: it shared it with the others, and 15 steps a second took over 6 ms instead of 4, at 3.6 in the
    median (16 CPUs, 15 threads). Returns the CPUs that are left to them; empty where there is no such choice.
    """
    spare = spare_cpus(threads)
    if len(spare) < LEAST:
        return set()
    for thread in threading.enumerate():
        if thread.native_id is not None:
            with contextlib.suppress(OSError):  # it ended meanwhile
                os.sched_setaffinity(thread.native_id, spare)
    return spare
