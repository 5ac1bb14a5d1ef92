"""Drawings of reports: tokens a second over slots or streams, time to the first token over new tokens."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftengine.errors import FtError
from ftlaunch.bench.report import Report, Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (8.0, 5.0)  # inches
DOTS = 120  # an inch

Line = list[tuple[float, float, float, float]]  # x; median, lowest and highest y


def check(path: Path) -> None:
    """Before anything is measured. Raises FtError when the drawing could not be written."""
    if path.suffix.lower() != ".png":
        raise FtError(f"{path} does not end in .png", f"--plot {path.stem or 'bench'}.png")
    if not path.absolute().parent.is_dir():
        raise FtError(f"there is no folder {path.absolute().parent}", f"mkdir -p {path.parent}")
    if path.is_dir():
        raise FtError(f"{path} is a folder", f"--plot {path}/bench.png")
    if importlib.util.find_spec("matplotlib") is None:
        # By its interpreter: the pip on the PATH may be that of another environment.
        install = f"{shlex.quote(sys.executable)} -m pip install 'ftlaunch[plot]'"
        raise FtError("drawing needs matplotlib, which is not installed", install)


def draw(reports: Sequence[Report], path: Path) -> None:
    """The first report, and others of the same kind for comparison, as a PNG. Raises OSError, and leaves nothing half
    written.
    """
    from matplotlib.figure import Figure  # without pyplot: it needs no display and keeps no state

    figure = Figure(figsize=SIZE, dpi=DOTS, layout="constrained")
    axes = figure.add_subplot()
    if reports[0].bench == "decode":
        _decode(axes, reports)
    else:
        _first_tokens(axes, reports)
    axes.set_title(f"ft bench {reports[0].bench}: {reports[0].machine}", fontsize="small", wrap=True)
    axes.grid(alpha=0.3)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small")
    draft = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(draft, format="png")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _decode(axes: Axes, reports: Sequence[Report]) -> None:
    """Over slots where the servers have different ones, a line for each number of streams; else over streams."""
    from matplotlib.ticker import MaxNLocator

    slots = {variant.server.get("slots") for report in reports for variant in report.variants}
    axes.set_ylabel("tokens/s, median and range")
    if len(slots) > 1 and None not in slots:
        axes.set_xlabel("slots, in percent of all experts")
        for prefix, report in _labelled(reports):
            for label, line in _over_slots(report):
                _line(axes, line, prefix + label)
        return
    axes.set_xlabel("streams")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for prefix, report in _labelled(reports):
        for variant in report.variants:
            _line(axes, _points(variant, "streams", "tokens_per_second"), prefix + _name(variant))


def _over_slots(report: Report) -> Iterator[tuple[str, Line]]:
    for streams in sorted({int(point.key["streams"]) for variant in report.variants for point in variant.points}):
        line: Line = []
        for variant in report.variants:
            for x, *y in _points(variant, "streams", "tokens_per_second"):
                if x == streams:
                    line.append((100 * variant.server["slots"] / variant.server["pool"], *y))
        yield f"{streams} stream{'s' * (streams > 1)}", sorted(line)


def _first_tokens(axes: Axes, reports: Sequence[Report]) -> None:
    axes.set_xlabel("new tokens of the prompt")
    axes.set_ylabel("time to the first token, ms")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    for prefix, report in _labelled(reports):
        for variant in report.variants:
            for kind in ("cold", "warm", None):
                part = Variant(variant.name, variant.what, variant.server)
                part.points = [point for point in variant.points if point.key.get("kind") == kind]
                line = _points(part, "new_tokens", "first_token_ms") or _points(part, "prompt_tokens", "first_token_ms")
                _line(axes, line, f"{prefix}{_name(variant)}{f', {kind}' if kind else ''}")


def _points(variant: Variant, x: str, y: str) -> Line:
    line: Line = []
    for point in variant.points:
        at = point.key.get(x, point.median(x))
        samples, middle = point.samples(y), point.median(y)
        if at is not None and middle is not None:
            line.append((max(1.0, float(at)), middle, min(samples), max(samples)))
    return sorted(line)


def _line(axes: Axes, line: Line, label: str) -> None:
    if line:
        x, middle, low, high = zip(*line, strict=True)
        errors = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
        axes.errorbar(x, middle, yerr=errors, marker="o", capsize=3, label=label)


def _name(variant: Variant) -> str:
    return f"{variant.name}  {variant.what}"[:60]


def _labelled(reports: Sequence[Report]) -> Iterator[tuple[str, Report]]:
    for number, report in enumerate(reports):
        yield "earlier " if number else "", report
