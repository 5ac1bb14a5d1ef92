"""A report for people: a table of at most 80 columns, and what a comparison comes to in sentences, which
`Output.lines` folds for a screen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ftlaunch.bench.report import Comparison, Key, Point, Report, Variant

Cell = Callable[[Point], str]


def heading(report: Report) -> Iterator[str]:
    """What stands above the table."""
    yield f"{report.machine}, {report.date}"
    for variant in report.variants:
        yield f"{variant.name}  {variant.what}{_server(variant)}"


def _server(variant: Variant) -> str:
    told = variant.server
    parts = [str(told[name]) for name in ("device", "dtype") if told.get(name)]
    if told.get("moe_backend"):
        parts.append(f"experts {told['moe_backend']}")
    if told.get("pool"):
        parts.append(f"{told['slots']:,} slots for {told['pool']:,} experts")
    return f" ({', '.join(parts)})" if parts else ""


def rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; a column that says nothing is left out, and the servers' names where there is one only."""
    names = ["set", *TABLES[report.bench]]
    lines = [
        [variant.name, *(cell(point) for cell in TABLES[report.bench].values())]
        for point_number in range(max(len(variant.points) for variant in report.variants))
        for variant in report.variants
        for point in variant.points[point_number : point_number + 1]
    ]
    kept = [n for n in range(len(names)) if (len(report.variants) > 1 if n == 0 else any(line[n] for line in lines))]
    return [names[n] for n in kept], [[line[n] or "-" for n in kept] for line in lines]


def notes(report: Report) -> list[str]:
    """What stands below the table."""
    found = [sentence(report, one) for one in report.comparisons]
    if report.bench == "load":
        found += [text for variant in report.variants for text in _stages(report, variant)]
    return found


def sentence(report: Report, one: Comparison) -> str:
    """Such as "B is 1.31 times as fast as A (1.27 to 1.36) at 1 stream"."""
    where = _case(report.bench, one.key)
    ratio = f"{one.times_as_fast:.2f} times as fast as {one.first}"
    if one.low is None or one.high is None:
        return f"{where}: {one.second} was {ratio} in a single run: more --runs tell whether that is noise"
    spread = f"{one.low:.2f} to {one.high:.2f}"
    if one.verdict == "within noise":
        return f"{where}: {one.second} and {one.first} do not differ beyond noise ({one.times_as_fast:.2f}, {spread})"
    return f"{where}: {one.second} is {ratio} ({spread})"


def other_settings(earlier: Report, report: Report) -> str:
    """Those of the earlier run that may make its figures differ, such as "temperature 0.0, prompts tokens"."""
    now, then = report.settings, earlier.settings
    names = [name for name in ("prompts", "temperature", "prompt", "output", "prefix", "results") if name in now]
    return ", ".join(f"{name} {then.get(name)}" for name in names if then.get(name) != now[name])


def _case(bench: str, key: Key) -> str:
    if bench == "decode":
        return f"{key['streams']} stream{'s' * (key['streams'] != 1)}"
    if bench == "prefill":
        return f"{key['tokens']} {'cold tokens' if key['kind'] == 'cold' else 'new tokens'}"
    return f"{key['page_cache']} start" if bench == "load" else f"step {key['step']} ({key['what']})"


def _stages(report: Report, variant: Variant) -> Iterator[str]:
    name = f"{variant.name}, " if len(report.variants) > 1 else ""
    for point in variant.points:
        stages = {stage: None for turn in point.turns for stage in turn if stage.startswith("stage: ")}
        parts = [f"{stage.removeprefix('stage: ')} {point.median(stage):.2f}" for stage in stages]
        if parts:
            yield f"{name}{point.key['page_cache']}, the engine's own stages in s: {', '.join(parts)}"


def _key(name: str) -> Cell:
    return lambda point: str(point.key.get(name, ""))


def _median(name: str, digits: int) -> Cell:
    def cell(point: Point) -> str:
        middle = point.median(name)
        return "" if middle is None else f"{middle:.{digits}f}"

    return cell


def _spread(name: str, digits: int) -> Cell:
    def cell(point: Point) -> str:
        samples = point.samples(name)
        return f"{min(samples):.{digits}f}-{max(samples):.{digits}f}" if len(samples) > 1 else ""

    return cell


def _most(name: str, digits: int) -> Cell:
    def cell(point: Point) -> str:
        samples = point.samples(name)
        return f"{max(samples):.{digits}f}" if samples else ""

    return cell


def _share(name: str, whole: str | None = None) -> Cell:
    def cell(point: Point) -> str:
        part, of = point.median(name), point.median(whole) if whole else 1.0
        return "" if part is None or not of else f"{part / of:.0%}"

    return cell


def _cut(point: Point) -> str:
    """An answer's length where it is another than was asked for."""
    tokens = point.median("output_tokens")
    return "" if tokens is None or tokens == point.key["output"] else f"{tokens:.0f}"


def _first_token() -> dict[str, Cell]:
    return {
        "prompt": _median("prompt_tokens", 0),
        "cached": _median("cached_tokens", 0),
        "new": _median("new_tokens", 0),
        "TTFT ms": _median("first_token_ms", 1),
        "spread": _spread("first_token_ms", 1),
    }


TABLES: dict[str, dict[str, Cell]] = {
    "decode": {
        "streams": _key("streams"),
        "tokens": _cut,
        "tok/s": _median("tokens_per_second", 1),
        "spread": _spread("tokens_per_second", 1),
        "gap ms": _median("gap_median_ms", 2),
        "p99": _median("gap_p99_ms", 2),
        "max": _most("gap_max_ms", 1),
        "hits": _share("hit_rate"),
    },
    "prefill": {
        "case": _key("kind"),
        **_first_token(),
        "new tok/s": _median("prompt_tokens_per_second", 0),
    },
    "load": {
        "page cache": _key("page_cache"),
        "listens s": _median("listens_s", 2),
        "ready s": _median("ready_s", 2),
        "spread": _spread("ready_s", 2),
        "first TTFT ms": _median("first_token_ms", 0),
    },
    "agent": {
        "step": _key("step"),
        "result": _key("what"),
        **_first_token(),
        "reused": _share("cached_tokens", "prompt_tokens"),
    },
}
