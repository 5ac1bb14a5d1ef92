"""How a pull is shown: bars a file and in total on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

import click

from ftlaunch.store.events import Complete, Event, Moved, Planned, Said, Stage

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0
JSON_SECONDS = 1.0
NAMES = {Said: "message", Stage: "stage", Planned: "plan", Moved: "progress", Complete: "file"}


class View(Protocol):
    def __call__(self, event: Event) -> None: ...


class Rate:
    """Bytes per second over the last seconds."""

    def __init__(self, over: float = 15.0) -> None:
        self._over = over
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, done: int) -> float:
        now = time.monotonic()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > self._over:
            self._seen.popleft()
        then, before = self._seen[0]
        return (done - before) / (now - then) if now > then else 0.0


class Bars:
    """Speaks to the terminal behind stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._total: TaskID | None = None
        self._files: dict[str, TaskID] = {}

    @contextmanager
    def shown(self) -> Iterator[View]:
        with self._progress:
            yield self._show

    def _show(self, event: Event) -> None:
        match event:
            case Said(text):
                self._progress.console.print(text, markup=False, highlight=False)
            case Planned():
                self._progress.console.print(plan(event), markup=False, highlight=False)
            case Moved(files, done, total):
                self._move(files, done, total)
            case Complete(file):
                self._drop(file)
            case _:
                pass

    def _move(self, files: dict[str, tuple[int, int]], done: int, total: int) -> None:
        if self._total is None:
            self._total = self._progress.add_task("Total", total=total, completed=done)
        for name, (moved, size) in files.items():
            if name not in self._files:
                self._files[name] = self._progress.add_task(name, total=size, completed=moved)
            self._progress.update(self._files[name], completed=moved)
        for name in self._files.keys() - files.keys():
            self._drop(name)
        self._progress.update(self._total, completed=done)

    def _drop(self, name: str) -> None:
        task = self._files.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)


class _Written:
    """Needs nothing around it; tells no more than a line now and then."""

    def __init__(self) -> None:
        self._last = 0.0
        self._rate = Rate()

    @contextmanager
    def shown(self) -> Iterator[View]:
        yield self._show

    def _show(self, event: Event) -> None:
        raise NotImplementedError


class Lines(_Written):
    def _show(self, event: Event) -> None:
        match event:
            case Said(text):
                click.echo(text, err=True)
            case Planned():
                click.echo(plan(event), err=True)
                self._last = time.monotonic()
            case Moved(_, done, total):
                rate = self._rate.at(done)
                if time.monotonic() - self._last >= LINE_SECONDS:
                    self._last = time.monotonic()
                    click.echo(f"{size(done)} of {size(total)}, {size(rate)}/s, {left(total - done, rate)}", err=True)
            case _:
                pass


class JsonLines(_Written):
    """One object a line on stdout."""

    def _show(self, event: Event) -> None:
        facts = asdict(event)
        if isinstance(event, (Moved, Stage)):
            if isinstance(event, Moved):
                rate = self._rate.at(event.done)
                seconds = (event.total - event.done) / rate if rate else None
                facts |= {"rate": round(rate), "seconds_left": None if seconds is None else round(seconds)}
                facts["files"] = {name: {"done": d, "size": s} for name, (d, s) in event.files.items()}
            if time.monotonic() - self._last < JSON_SECONDS and not (isinstance(event, Moved) and not event.files):
                return
            self._last = time.monotonic()
        json_line({"event": NAMES[type(event)], **facts})


def json_line(facts: dict[str, object]) -> None:
    click.echo(json.dumps(facts))
    sys.stdout.flush()


def plan(event: Planned) -> str:
    revision = f" at revision {event.revision[:12]}" if event.revision else ""
    present = f", {size(event.present)} of them are here already" if event.present else ""
    files = "1 file" if event.files == 1 else f"{event.files} files"
    return f"{event.name}{revision}: {files}, {size(event.bytes)}{present}"


def size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"


def left(count: int, rate: float) -> str:
    if rate <= 0:
        return "time left unknown"
    seconds = count / rate
    return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
