"""Starts: the time until a server listens, until it is ready, and its first answer; with and without the page cache."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ftlaunch.bench.client import Target, stream
from ftlaunch.bench.place import Show, Started, description, target_of
from ftlaunch.bench.prompts import code, opening
from ftlaunch.bench.report import Point, Variant

TIMELINE = re.compile(r"start: [\d.]+ s \((.*)\)")
STAGE = re.compile(r"([^,()]+?) ([\d.]+)(?:, |$)")
FIRST_PROMPT = 1000  # characters


@dataclass(frozen=True)
class Load:
    runs: int = 3
    cold: bool = True  # also with the model's files out of the page cache


def measure(place: Started, settings: Load, variant: Variant, show: Show) -> list[Point]:
    """Starts and stops the server for each sample. Raises FtError.

    The first start, which may compile and measure, is not counted, as the warm ones come behind the cold ones.
    """
    states = ["cold", "warm"] if settings.cold else ["warm"]
    points = [Point({"page_cache": state}, [{}]) for state in states]
    folder = Path(place.options.model)
    show("start that is not counted", 0.0)
    _start(place, variant)
    for point in points:
        state = str(point.key["page_cache"])
        for run in range(settings.runs):
            show(f"{state} starts", run / settings.runs)
            if state == "cold":
                forget(folder)
            for name, value in _start(place, variant).items():
                point.turns[0].setdefault(name, []).append(value)
        show(f"{state} starts", 1.0)
    return points


def _start(place: Started, variant: Variant) -> dict[str, float]:
    from ftlaunch.servers import wait_ready

    began = time.monotonic()
    with place.start() as record:
        found = {"listens_s": time.monotonic() - began}
        wait_ready(record)
        found["ready_s"] = time.monotonic() - began
        target = target_of(record)
        found["first_token_ms"] = 1e3 * _first_answer(target)
        variant.server = variant.server or description(target)
        return found | (timeline(record.log) if record.log is not None else {})


def _first_answer(target: Target) -> float:
    body = {"prompt": opening() + code("first", FIRST_PROMPT), "max_tokens": 1, "temperature": 0}
    return stream(target, "/v1/completions", body).first


def timeline(log: Path) -> dict[str, float]:
    """Seconds by stage, as the engine wrote them into its log; empty where it did not."""
    try:
        found = TIMELINE.findall(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}
    return {f"stage: {name}": float(seconds) for name, seconds in STAGE.findall(found[-1])} if found else {}


def forget(model: Path) -> None:
    """Give up the pages that the system keeps of a model's files; those that another process maps stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    files = [path for path in model.rglob("*") if path.is_file()] if model.is_dir() else [model]
    for path in files:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # pages not yet written cannot be given up
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
