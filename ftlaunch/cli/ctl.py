"""`ft ctl`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ftlaunch.cli.output import Output, duration, json_option

if TYPE_CHECKING:
    from ftlaunch.servers import ServerRecord

PLACES = {
    "token": "at any token",
    "last_user": "before the last user message",
    "question_end": "after the last user message",
    "spacing": "inside a long block",
}
LATEST = 4  # requests that are shown
STATS_SECONDS = 5.0  # the front asks the engine for two, and a step may be under way

RESIDENT = "resident: every expert has a slot, so nothing is looked up and nothing is counted"
LAYER_COLUMNS = (
    "LAYER", "HITS", "MISS", "FETCH", "AHEAD\nUSED", "CPU", "CPU\nROUTES",
    "LINK\nMB", "LINK\nms", "CPU\nMB", "CPU\nms", "WAIT\nms",
)  # fmt: skip


@click.group()
def command() -> None:
    """Ask a running server."""


@command.command("stats")
@click.argument("which", metavar="[NAME|PORT]", required=False)
@click.option("--layers", is_flag=True, help="One row for each layer of the expert cache.")
@json_option
def stats(which: str | None, layers: bool, as_json: bool) -> None:
    """Show what a server has counted since its start.

    NAME is a model's name or directory, PORT the port a server listens on. With neither, the only running server is
    asked. --json prints the whole answer of /v1/stats (docs/api.md).
    """
    from ftengine.errors import FtError
    from ftlaunch.cli.which import server_meant
    from ftlaunch.servers.ask import ask
    from ftlaunch.servers.health import log_hint

    record = server_meant(which, "ft ctl stats")
    body = ask(record, "/v1/stats?layers=1" if layers else "/v1/stats", STATS_SECONDS)
    if body is None or "version" not in body:
        raise FtError(f"the server of {record.served_name} at {record.url} does not answer", log_hint(record))
    from ftlaunch.machine.remember import remember

    remember(record, body)
    output = Output(as_json)
    if as_json:
        output.result("", body)
        return
    try:
        _show(output, record, body, layers)
        if body.get("engine") is None:
            output.say(_missing_engine(record))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        reason = f"what answers at {record.url} does not tell what this version of ft reads ({error!r})"
        raise FtError(reason, f"ft ctl stats {record.port} --json") from error


def _show(output: Output, record: ServerRecord, body: dict[str, Any], layers: bool) -> None:
    if not layers:
        named = list(_values(body))  # whatever is missing is noticed before anything is printed
        output.lines([_headline(record, body)])
        output.values(named)
        return
    experts = (body.get("engine") or {}).get("experts") or {}
    counted = [] if experts.get("resident") else experts.get("layers") or []
    nothing = f"The server of {record.served_name} has no cache of experts on a GPU."
    if experts.get("resident"):
        nothing = f"The server of {record.served_name} is {RESIDENT}."
    output.table(LAYER_COLUMNS, [_layer(number, layer) for number, layer in enumerate(counted)], body, nothing)


def _missing_engine(record: ServerRecord) -> str:
    """Why there are no figures of the engine, and what helps."""
    from ftlaunch.servers.health import health, log_hint, state

    answer = health(record)
    error = (answer or {}).get("error") or {}
    step = error.get("next_step") or (log_hint(record) if error or answer is None else f"ft ctl stats {record.port}")
    return f"The engine of {record.served_name}: {state(answer)}. Try: {step}"


def _headline(record: ServerRecord, body: dict[str, Any]) -> str:
    restarts = body["restarts"]
    again = f", its engine was started again {restarts} time{'s' * (restarts > 1)}" if restarts else ""
    return f"{record.served_name} at {record.url}, up {duration(round(body['uptime_seconds']))}{again}"


def _values(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tokens = body["tokens"]
    answers = [f"{count:,} {name}" for name, count in body["answers"].items()]
    yield "answers", f"{body['running']} running; so far {', '.join(answers) or 'none'}"
    yield "tokens", f"{tokens['prompt']:,} of prompts ({tokens['cached']:,} cached), {tokens['output']:,} generated"
    engine = body.get("engine")
    if engine is None or "steps" not in engine:
        yield "engine", "does not answer now"
        return
    requests, steps, cache = engine["requests"], engine["steps"], engine["cache"]
    names = ("running", "waiting", "finished", "cancelled", "failed", "preempted")
    yield "requests", ", ".join(f"{requests[name]:,} {name}" for name in names)
    times = ", ".join(f"{name} {steps[f'{name}_ms']:.2f} ms" for name in ("p50", "p90", "p99"))
    batch = f"{steps['mean_batch']:.2f} sequences each (at most {steps['largest_batch']})"
    yield "steps", f"{steps['count']:,}, {batch}, {times}"
    yield (
        "KV pages",
        f"{cache['pages_used']:,} used and {cache['pages_cached']:,} cached of {cache['pages_total']:,}, "
        f"{cache['page_size']} tokens each",
    )
    yield from _prompts(engine["prompts"])
    if engine.get("experts"):
        yield from _experts(engine["experts"], (body.get("facts") or {}).get("moe_backend"))


def _prompts(prompts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    found = ", ".join(f"{tokens:,} from {tier}" for tier, tokens in prompts["reused"].items() if tokens)
    yield (
        "reused",
        f"{sum(prompts['reused'].values()):,} of {prompts['prompt']:,} tokens of prompts{found and f': {found}'}; "
        f"{prompts['new']:,} new, {prompts['repeated']:,} computed again",
    )
    places = sorted(prompts["boundaries"].items(), key=lambda item: -item[1])
    if places:
        yield "went on", ", ".join(f"{count:,} {_after(name)}" for name, count in places)
    for tier in prompts["tiers"]:
        yield tier["name"], _tier(tier)
    for each in prompts["latest"][: -LATEST - 1 : -1]:
        yield "latest", _admission(each)


def _after(place: str) -> str:
    """place: a BoundaryKind."""
    return PLACES.get(place) or f"after {place.replace('_', ' ')}"


def _tier(tier: dict[str, Any]) -> str:
    from ftlaunch.cli.list import size

    parts = [_count(tier["anchors"], "place"), *([_count(tier["chunks"], "chunk")] if tier["chunks"] else [])]
    text = f"{' and '.join(parts)}, {size(tier['used'])} of {size(tier['budget'])}, {tier['evictions']:,} given up"
    if tier["written"] or tier["read"]:
        text += f", {size(tier['written'])} written, {size(tier['read'])} read"
    return text + (f", {tier['failures']:,} damaged" if tier["failures"] else "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _admission(found: dict[str, Any]) -> str:
    where = f" from {found['tier']}" if found["tier"] else ""
    kind = f" {_after(found['boundary'])}" if found["boundary"] else ""
    who = f"{found['session'] or 'no session'}{' (side)' if found['side'] else ''}"
    return f"{who}: {found['reused']:,} of {found['prompt']:,}{where}{kind}, new from {found['changed']:,}"


def _experts(experts: dict[str, Any], strategy: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """strategy: what was chosen for experts without a slot, and why."""
    held = f"{experts['slots']:,} slots for {experts['pool']:,} experts of {experts['layer_count']} layers"
    if experts["resident"]:
        yield "experts", f"{RESIDENT} ({held})"
    else:
        yield "experts", held
    if strategy is not None:
        yield "strategy", f"{strategy['value']} ({strategy['reason']})"
    if experts["resident"]:
        return
    total = experts["total"]
    looked_up = total["hits"] + total["misses"]
    yield "lookups", f"{looked_up:,} in {experts['decode_steps']:,} decode steps, {total['hit_rate']:.1%} hits"
    if most := experts.get("prefetch"):
        yield "prefetch", f"{_prefetched(total, looked_up)}; at most {most} a layer"
    took = f"{experts['link_ms'] / 1e3:,.1f} s"
    yield (
        "link",
        f"{total['fetched']:,} fetched ({total['kept']:,} kept), {total['admitted']:,} admitted, {total['staged']:,} "
        f"staged; {total['link_bytes'] / 1e9:,.1f} GB"
        f"{f', {took} without the prefetched' if total.get('prefetched') else f' in {took}'}; "
        f"n experts take {_cost(experts['link_cost'])}",
    )
    yield (
        "CPU",
        f"{total['cpu_experts']:,} experts, {total['cpu_routes']:,} routes, {total['cpu_bytes'] / 1e9:,.1f} GB in "
        f"{experts['cpu_ms'] / 1e3:,.1f} s, {total['cpu_wait_ms'] / 1e3:,.1f} s waited for; "
        f"n experts take {_cost(experts['cpu_cost'])}",
    )
    if split := experts.get("split"):
        yield "split", f"follows what both lanes cost; moved {_times(split['moves'])}, {_since(split)}"
    if rest := experts.get("rest"):
        now = "one sequence leaves it alone now" if rest["alone"] else "one sequence uses it now"
        left = f"{rest['steps']:,} of {experts['decode_steps']:,} decode steps left the CPU alone"
        yield "rest", f"{left}; {now}, changed {_times(rest['moves'])}"


def _prefetched(total: dict[str, Any], looked_up: int) -> str:
    count, used = total["prefetched"], total["foretold"]
    if not count or not looked_up:
        return "no expert was copied before its layer began"
    return (
        f"{count:,} experts copied before their layer began, {used / count:.0%} of them used: {used / looked_up:.1%} "
        "of the lookups, beside the hits"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _since(split: dict[str, Any]) -> str:
    return f"as it is for {split['since_s']:,.0f} s"


def _cost(cost: dict[str, float]) -> str:
    return f"{cost['fixed_us']:.0f} + {cost['each_us']:.0f}n us"


def _layer(number: int, layer: dict[str, Any]) -> list[str]:
    """LAYER_COLUMNS, for 80 columns."""
    ahead = layer.get("prefetched", 0)
    return [
        str(number),
        f"{layer['hit_rate']:.1%}".replace("100.0", "100"),
        *(_short(layer[name]) for name in ("misses", "fetched")),
        f"{_short(ahead)} {layer['foretold'] / ahead:.0%}" if ahead else "0",
        *(_short(layer[name]) for name in ("cpu_experts", "cpu_routes")),
        *(text for lane in ("link", "cpu") for text in (_short(layer[f"{lane}_bytes"] / 1e6), _time(layer, lane))),
        _short(layer["cpu_wait_ms"]),
    ]


def _time(layer: dict[str, Any], lane: str) -> str:
    """Milliseconds; a server of a version before counts them over all layers only."""
    time = layer.get(f"{lane}_ms")
    return "-" if time is None else _short(time)


def _short(number: float) -> str:
    """At most four characters, which are exact up to 9,999."""
    if number < 9999.5:
        return f"{number:.0f}"
    for letter in ("k", "M", "G", "T"):
        number /= 1000
        if number < 9.95:
            return f"{number:.1f}{letter}"
        if number < 999.5:
            break
    return f"{number:.0f}{letter}"
