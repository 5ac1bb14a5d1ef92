"""`ft bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftlaunch.cli import bench_bw, bench_served
from ftlaunch.cli.output import Output, json_option
from ftlaunch.cli.sizes import Share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftengine.bench.cpu import Report
    from ftengine.bench.whole_model import WholeModel
    from ftengine.experts.replay import Replayed
    from ftengine.experts.trace import Trace

FORMATS = ("bf16", "fp8", "fp8-block", "nvfp4", "mxfp4", "q8_0", "q4_0")
POLICIES = ("lru", "aged", "belady")
MOST_STEPS = 4096  # ftengine.wire.MOST_TRACE_STEPS, which is slower to import
SLOTS = (5.0, 10.0, 25.0, 37.0, 50.0)


@click.group()
def command() -> None:
    """Measure this machine and what it serves."""


for other in (bench_bw.bw, bench_served.decode, bench_served.prefill, bench_served.load, bench_served.agent):
    command.add_command(other)


@command.command("cpu")
@click.option(
    "--format",
    "formats",
    type=click.Choice(FORMATS),
    multiple=True,
    help="A number format of the experts; may be given again.  [default: all]",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Beside one thread.  [default: one a core]")
@click.option("--model", metavar="NAME|DIR", help="Time a whole model instead: prefill, and decode at batch 1 and 4.")
@json_option
def cpu(formats: tuple[str, ...], threads: int | None, model: str | None, as_json: bool) -> None:
    """Measure the CPU kernels against the machine's read bandwidth.

    Reads a large buffer with one thread and with all, then times one layer of experts in the shape of Qwen3.6-35B-A3B
    (256 experts of 512, hidden size 2048, 8 a token) in each format with 1, 8 and 64 rows. Decoding reads every weight
    that it uses once, so the share of the bandwidth that is reached tells how good a kernel is there. Medians of 5.
    Takes less than a minute on an idle machine; what else runs makes the numbers worse.
    """
    output = Output(as_json)
    if model is not None:
        _model(output, model, threads)
        return
    from ftengine.bench.cpu import run

    with output.progress() as show:
        report = run(formats or FORMATS, threads, show)
    _show(output, report)


def _show(output: Output, report: Report) -> None:
    rates = ", ".join(
        f"{rate / 1e9:.1f} GB/s with {count} thread{'s' * (count > 1)}" for count, rate in report.bandwidth.items()
    )
    output.lines(
        [
            f"{report.processor}, {report.date}",
            f"kernels: {report.kernels.value} ({report.kernels.reason}), {report.dtype} activations",
            f"reads memory at {rates}",
        ]
    )
    rows = [
        [
            timing.format,
            str(timing.batch),
            str(timing.threads),
            f"{timing.milliseconds:.3f}",
            f"{timing.bytes_per_second / 1e9:.1f}",
            f"{report.share(timing):.0%}",
        ]
        for timing in report.timings
    ]
    output.table(("format", "rows", "threads", "ms", "GB/s", "of reading"), rows, report.as_json(), "")


def _model(output: Output, name: str, threads: int | None) -> None:
    from ftengine.bench.cpu import run_model
    from ftlaunch.store.names import resolve

    with output.progress() as show:
        found = run_model(resolve(name), threads, show)
    text, data = _model_result(found)
    output.result(text, data)


def _model_result(found: WholeModel) -> tuple[str, dict[str, Any]]:
    from dataclasses import asdict

    lines = [f"prefill of {found.prefill_tokens} tokens: {found.prefill_tokens_per_second:.1f} tokens/s"]
    lines += [
        f"decode, batch {decode.batch}: {decode.tokens_per_second:.1f} tokens/s, {decode.step_ms:.2f} ms a step, "
        f"{decode.outside_ms:.3f} ms of it outside the model"
        for decode in found.decodes
    ]
    return "\n".join(lines), asdict(found)


class _ReplayByDefault(click.Group):
    """`trace FILE.npz` is `trace replay FILE.npz`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["replay", *args]
        return super().parse_args(ctx, args)


@command.group("trace", cls=_ReplayByDefault)
def trace() -> None:
    """Record and replay which experts a model uses.

    `ft bench trace FILE.npz` replays, too.
    """


@trace.command("record")
@click.argument("which", metavar="[NAME|PORT]", required=False)
@click.option(
    "--steps", type=click.IntRange(1, MOST_STEPS), metavar="N", default=512, show_default=True, help="Decode steps."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.npz", required=True, help="A new file."
)
@json_option
def record(which: str | None, steps: int, out: Path, as_json: bool) -> None:
    """Record the routing of a running server on a GPU.

    NAME is a model's name or directory, PORT the port a server listens on. With neither, the only running server is
    meant. Takes its next N decode steps, steps without a prompt in them: send it requests meanwhile. Of a batch, the
    first sequence is recorded: the experts chosen, the next best, and their probabilities. No text, no tokens.
    """
    from ftengine.errors import FtError
    from ftengine.experts.trace import store_trace
    from ftlaunch.cli.which import server_meant
    from ftlaunch.servers.ask import fetch
    from ftlaunch.servers.health import log_hint

    output = Output(as_json)
    server = server_meant(which, "ft bench trace record")
    again = "ft bench trace record --out ANOTHER.npz"
    if out.exists():
        raise FtError(f"{out} is there already", again)
    if not out.absolute().parent.is_dir():
        raise FtError(f"there is no folder {out.absolute().parent}", again)
    output.say(f"Recording {steps} decode steps of {server.served_name} at {server.url}; send it requests.")
    data = fetch(server, "/v1/trace", {"steps": steps}, log_hint(server))
    try:
        recorded = store_trace(out, data)
    except OSError as error:
        raise FtError(f"{out} cannot be written: {error.strerror or error}", again) from error
    output.result(f"{out}: {_shape(recorded)}", {"file": str(out), **_numbers(recorded)})
    output.say(f"Next:  ft bench trace {out}")


@trace.command("replay")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.npz")
@click.option(
    "--slots",
    "percents",
    type=Share(0, 100),
    multiple=True,
    metavar="PERCENT",
    help="Slots, in percent of all experts; may be given again.  [default: 5 10 25 37 50]",
)
@click.option(
    "--policy", "policies", type=click.Choice(POLICIES), multiple=True, help="May be given again.  [default: all]"
)
@json_option
def replay_file(file: Path, percents: tuple[float, ...], policies: tuple[str, ...], as_json: bool) -> None:
    """Replay recorded routing through caches of experts.

    FILE.npz holds which experts a model's routers chose, step by step. Prints how many of them a cache would have
    held, by its size and by the rule that picks what it gives up: "lru" what was used longest ago, "aged" the lowest
    of the scores that the engine keeps, "belady" what is needed furthest in the future, which no rule can beat.
    Every missing expert is taken in. The first quarter of the steps fills the cache and is not counted.
    """
    from ftengine.errors import FtError
    from ftengine.experts.replay import replay
    from ftengine.experts.trace import load_trace

    output = Output(as_json)
    if not file.is_file():
        raise FtError(f"{file} is not a file, but a device or a pipe", "ft bench trace --help")
    recorded = load_trace(file)
    sizes = [round(percent / 100 * recorded.layers * recorded.experts) for percent in percents or SLOTS]
    rules = policies or POLICIES
    found = []
    with output.progress() as show:
        for number, size in enumerate(sizes):
            show("replaying", number / len(sizes))
            found.append([replay(recorded, size, rule, warm=recorded.steps // 4) for rule in rules])
        show("replaying", 1.0)
    _show_trace(output, recorded, rules, found)


def _show_trace(output: Output, recorded: Trace, rules: Sequence[str], found: list[list[Replayed]]) -> None:
    pool = recorded.layers * recorded.experts
    output.lines([f"{_shape(recorded)}; found in slots:"])
    rows = [
        [str(row[0].slots), f"{row[0].slots / pool:.0%}", *(f"{result.hit_rate:.1%}" for result in row)]
        for row in found
    ]
    data = {
        **_numbers(recorded),
        "results": [
            {"policy": result.policy, "slots": result.slots, "share": result.slots / pool, "hit_rate": result.hit_rate}
            for row in found
            for result in row
        ],
    }
    output.table(("slots", "of all", *rules), rows, data, "")


def _shape(recorded: Trace) -> str:
    return f"{recorded.steps} steps, {recorded.layers} layers, {recorded.top_k} of {recorded.experts} experts each"


def _numbers(recorded: Trace) -> dict[str, int]:
    return {name: getattr(recorded, name) for name in ("steps", "layers", "experts", "top_k")}
