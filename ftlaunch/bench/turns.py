"""Several servers measured in turns, A B A B, so that a machine that drifts does not decide which is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from ftengine.memory.machine import cpu_name
from ftlaunch.bench.client import Target
from ftlaunch.bench.compare import compare_turns
from ftlaunch.bench.load import Load
from ftlaunch.bench.load import measure as measure_load
from ftlaunch.bench.place import Place, Show, Started, description
from ftlaunch.bench.report import Point, Report, Variant

Measure = Callable[[Target, Any, Show], list[Point]]


def measured(bench: str, measure: Measure, settings: Any, places: Sequence[Place], turns: int, show: Show) -> Report:
    """settings: of `measure`, a dataclass. Raises FtError."""

    def turn(place: Place, variant: Variant, told: Show) -> list[Point]:
        with place.open(told) as target:
            variant.server = variant.server or description(target)
            return measure(target, settings, told)

    return _report(bench, settings, places, turns, show, turn)


def loaded(settings: Load, places: Sequence[Started], turns: int, show: Show) -> Report:
    def turn(place: Started, variant: Variant, told: Show) -> list[Point]:
        return measure_load(place, settings, variant, told)

    return _report("load", settings, places, turns, show, turn)


def _report(
    bench: str,
    settings: Any,
    places: Sequence[Any],
    turns: int,
    show: Show,
    turn: Callable[[Any, Variant, Show], list[Point]],
) -> Report:
    variants = [Variant(chr(ord("A") + number), place.what) for number, place in enumerate(places)]
    for number in range(turns):
        for place, variant in zip(places, variants, strict=True):
            variant.add(turn(place, variant, _named(show, variant.name, number, len(places) > 1)))
    report = Report(
        bench=bench,
        ft=_version(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=_machine(),
        settings={**msgspec.to_builtins(settings), "turns": turns},
        variants=variants,
    )
    report.comparisons = compare_turns(report)
    return report


def _named(show: Show, name: str, turn: int, several: bool) -> Show:
    return (lambda stage, done: show(f"{name}, turn {turn + 1}: {stage}", done)) if several else show


def _machine() -> str:
    """Enough to notice that two reports come from different machines."""
    import platform

    import psutil

    return f"{cpu_name()}, {psutil.cpu_count(logical=False) or psutil.cpu_count()} cores, {platform.system()}"


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("ftlaunch")
    except metadata.PackageNotFoundError:
        return "unknown"
