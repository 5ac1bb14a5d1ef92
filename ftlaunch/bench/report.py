"""What was measured, and its JSON.

A sample is one run's number. Samples are kept by turn, a turn being one time that a server was there to be measured:
what differs between turns (where memory lies, what the machine does beside) must not pass for what differs between
servers.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from ftengine.errors import FtError

SCHEMA = 1
MOST_BYTES = 64 << 20

Key = dict[str, int | str]


class Metric(msgspec.Struct, frozen=True):
    """The number that runs are compared by."""

    name: str
    unit: str
    more_is_better: bool


METRICS = {
    "decode": Metric("tokens_per_second", "tokens/s", True),
    "prefill": Metric("first_token_ms", "ms", False),
    "load": Metric("ready_s", "s", False),
    "agent": Metric("first_token_ms", "ms", False),
}


class Point(msgspec.Struct):
    """One case: what was asked, and the samples of each turn by the metric's name."""

    key: Key
    turns: list[dict[str, list[float]]]

    def samples(self, name: str) -> list[float]:
        return [sample for turn in self.turns for sample in turn.get(name, ())]

    def median(self, name: str) -> float | None:
        samples = self.samples(name)
        return statistics.median(samples) if samples else None


class Variant(msgspec.Struct):
    """A server, or a way to start one."""

    name: str  # A, B, ...
    what: str  # flags or address
    server: dict[str, Any] = {}
    points: list[Point] = []

    def add(self, points: list[Point]) -> None:
        """Those of another turn."""
        known = {tuple(point.key.items()): point for point in self.points}
        for point in points:
            if (old := known.get(tuple(point.key.items()))) is not None:
                old.turns += point.turns
            else:
                self.points.append(point)

    def at(self, key: Key) -> Point | None:
        return next((point for point in self.points if point.key == key), None)


class Comparison(msgspec.Struct):
    """How many times as fast `second` is as `first`; `low` and `high` are None where no spread is known."""

    first: str
    second: str
    key: Key
    times_as_fast: float
    low: float | None
    high: float | None
    verdict: str  # faster, slower, within noise, unknown


class Report(msgspec.Struct):
    bench: str
    ft: str
    date: str  # ISO 8601, when it ended
    machine: str  # of the command, and of its server unless that is at an address elsewhere
    settings: dict[str, Any]
    variants: list[Variant]
    comparisons: list[Comparison] = []
    schema: int = SCHEMA

    @property
    def metric(self) -> Metric:
        return METRICS[self.bench]

    def as_json(self) -> dict[str, Any]:
        """With medians beside the samples, for whoever reads it without this program."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        for variant, written in zip(self.variants, data["variants"], strict=True):
            for point, form in zip(variant.points, written["points"], strict=True):
                names = {name: None for turn in point.turns for name in turn}
                form["median"] = {name: point.median(name) for name in names}
        return data


def load_report(path: Path, bench: str) -> Report:
    """What an earlier `ft bench BENCH --json` printed. Raises FtError."""
    again = f"ft bench {bench} --json > {path.name}"
    try:
        with path.open("rb") as file:
            report = msgspec.json.decode(file.read(MOST_BYTES), type=Report)
    except OSError as error:
        raise FtError(f"{path} cannot be read: {error.strerror}", again) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FtError(f"{path} is not what ft bench {bench} --json prints ({error})", again) from error
    if report.bench != bench or report.schema != SCHEMA:
        what = f"ft bench {report.bench}" if report.schema == SCHEMA else "another version"
        raise FtError(f"{path} comes from {what}", again)
    if not any(variant.points for variant in report.variants):
        raise FtError(f"{path} holds no measurement", again)
    return report
