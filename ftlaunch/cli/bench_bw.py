"""`ft bench bw`: what missing experts cost over the link and on the CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ftlaunch.cli.output import Output, json_option

if TYPE_CHECKING:
    from ftlaunch.bench.bandwidth import Result
    from ftlaunch.machine.computing import Watch

MOST_THREADS = 1024


def _formats(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Out of nvfp4,bf16."""
    from ftengine.formats.format import FORMATS

    if text is None:
        return ()
    names = tuple(word.strip().lower() for word in text.split(","))
    unknown = next((name for name in names if name not in FORMATS), None)
    if unknown is not None:
        raise click.BadParameter(f"{unknown[:40]!a} is no number format; there are {', '.join(FORMATS)}")
    return names


@click.command("bw")
@click.option(
    "--model",
    metavar="NAME|DIR|FILE",
    help="The shape and formats of its experts.  [default: a model of the store, else Qwen3.6-35B-A3B in nvfp4]",
)
@click.option("--dtype", "formats", callback=_formats, metavar="NAME,…", help="Number formats instead of the model's.")
@click.option(
    "--threads",
    type=click.IntRange(1, MOST_THREADS),
    metavar="N",
    help="Of the CPU.  [default: as many as ft serve takes]",
)
@click.option("--fresh", is_flag=True, help="Measure also what profile.json has already.")
@json_option
def bw(model: str | None, formats: tuple[str, ...], threads: int | None, fresh: bool, as_json: bool) -> None:
    """Measure what experts without a slot cost.

    Times 1, 2, 4 and 8 random experts of a layer with the kernels of a decode step: fetched by the GPU, computed by the
    CPU, both at once. Prints the line a + b n through each lane's times, what the published rule recommends for such
    bandwidths, and how many of 1 to 8 missing experts ft fetches. Shows what profile.json in the cache folder has of
    this machine; what is measured is kept there, where ft serve finds it. Without a GPU: the CPU alone.
    """
    from ftlaunch.bench.bandwidth import Asked, experts_of, measure
    from ftlaunch.machine.computing import Watch
    from ftlaunch.servers import running

    output = Output(as_json)
    experts = experts_of(model, formats)
    missing = _no_gpu()
    if missing:
        output.say(f"The link is not measured: {missing}.")
    asked = Asked(experts.layouts, "cpu" if missing else "cuda", threads, fresh)
    watch = Watch(os.getpid(), running())
    with output.progress() as show:
        results = measure(asked, show, output.say)
    _show(output, experts.whose, results, missing)
    if threads is not None and threads > (used := results[0].profile.key.threads):
        output.say(f"Of {threads} threads {used} computed: ft may use no more CPUs here.")
    if any(result.now for result in results) and (others := _others(watch, gpu=not missing)):
        output.say(f"Computed meanwhile: {others}. Figures may be low.")


def _no_gpu() -> str:
    """Why there is none to measure, as `ft serve` finds it; empty if there is one."""
    from ftengine.memory.gpu import probe, unusable
    from ftlaunch.machine.software import torch_cuda

    lacking = unusable(probe(), torch_cuda())
    return "" if lacking is None else lacking.reason


def _others(watch: Watch, *, gpu: bool) -> str:
    """Who else computed since then, and who holds the GPU's memory as `ft doctor` finds it; empty: nobody."""
    found = [watch.seen().who()]
    if gpu:
        from ftlaunch.machine.probe import BY_NAME, Asked
        from ftlaunch.machine.run import known, run

        data = known(run([BY_NAME["gpu"]], Asked(quick=True)).values())
        holders = data.get("gpu.memory", {}).get("holders") or []
        found += [f"on the GPU {holder['name'] or 'another program'}" for holder in holders[:3]]
    return ", ".join(filter(None, found))


def _show(output: Output, whose: str, results: list[Result], missing: str) -> None:
    from ftlaunch.bench.bandwidth_table import as_json, heading, notes, rows

    if output.as_json:
        output.result("", as_json(whose, results, missing, _facts()))
    else:
        for number, result in enumerate(results):
            output.lines([*([""] if number else []), *heading(whose, result)])
            output.table(*rows(result.profile), None, "")
            output.lines(notes(result, missing))
    if any(result.kept for result in results):  # why, who measured has said
        output.say("As it is not kept, ft serve will measure again.")


def _facts() -> dict[str, Any]:
    import datetime

    from ftlaunch.cli.version import distribution_version

    return {"ft": distribution_version(), "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}
