"""Limits of time that a machine which stands still for a moment does not break."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    """That `work` takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def quickest(measure: Callable[[], float], limit: float, tries: int = 5) -> float:
    """The best of what `measure` returns, which is asked again only while nothing was below `limit`.

    What is slow by itself is slow each time; what another process held up once is not.
    """
    best = measure()
    for _ in range(tries - 1):
        if best < limit:
            break
        best = min(best, measure())
    return best
