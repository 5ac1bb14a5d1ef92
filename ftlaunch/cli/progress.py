"""How far something is: bars on a terminal, lines elsewhere. Both are called with (stage, fraction 0..1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import TaskID


class Bars:
    """One bar per stage; a new stage completes the one before it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> Callable[[str, float], None]:
        self._progress.start()
        return self._show

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._complete()
        self._progress.stop()

    def _show(self, stage: str, fraction: float) -> None:
        if self._task is None or stage != self._stage:
            self._complete()
            self._task, self._stage = self._progress.add_task(stage, total=1.0), stage
        self._progress.update(self._task, completed=fraction)

    def _complete(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=1.0)


class Lines:
    """A line when a stage begins and at most every `interval` seconds after that."""

    def __init__(self, say: Callable[[str], None], interval: float = 10.0) -> None:
        self._say = say
        self._interval = interval
        self._stage = ""
        self._last = 0.0

    def __enter__(self) -> Callable[[str, float], None]:
        return self._show

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _show(self, stage: str, fraction: float) -> None:
        now = time.monotonic()
        if stage == self._stage and now - self._last < self._interval:
            return
        self._say(stage if stage != self._stage else f"{stage}: {fraction:.0%}")
        self._stage, self._last = stage, now
