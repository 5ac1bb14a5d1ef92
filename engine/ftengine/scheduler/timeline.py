"""What the time of a start went into."""

from __future__ import annotations

import time


class Timeline:
    """Stages that follow each other; `mark` ends the one that runs."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.stages: dict[str, float] = {}  # seconds by name, in order

    def mark(self, stage: str) -> float:
        """Seconds since the mark before."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds
        return seconds

    def __str__(self) -> str:
        parts = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.stages.items())
        return f"start: {self._last - self._began:.2f} s ({parts})"
