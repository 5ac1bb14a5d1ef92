"""`ft bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ftlaunch.cli.output import Output, json_option

if TYPE_CHECKING:
    from ftengine.bench.cpu import Report
    from ftengine.bench.whole_model import WholeModel

FORMATS = ("bf16", "fp8", "fp8-block", "nvfp4", "mxfp4", "q8_0", "q4_0")


@click.group()
def command() -> None:
    """Measure this machine."""


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
    if not output.as_json:
        rates = ", ".join(
            f"{rate / 1e9:.1f} GB/s with {count} thread{'s' * (count > 1)}" for count, rate in report.bandwidth.items()
        )
        output.result(f"{report.processor}, {report.date}", None)
        output.result(f"kernels: {report.kernels.value} ({report.kernels.reason}), {report.dtype} activations", None)
        output.result(f"reads memory at {rates}", None)
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
