"""`ft verify`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import click

from ftlaunch.cli.output import Output, json_option

if TYPE_CHECKING:
    from ftlaunch.store.find import Found
    from ftlaunch.store.verify import Report


@click.command()
@click.argument("models", metavar="[NAME|DIR|FILE]...", nargs=-1)
@json_option
def command(models: tuple[str, ...], as_json: bool) -> int:
    """Check every byte of models against their recorded hashes.

    Without a name, all models of the store. Hashes are recorded when a model is pulled or converted; models in the
    Hugging Face cache have them in their file names. Of a model without any, sizes and headers are checked, and that is
    said. A bad file is named with the command that fetches it again. Exits with 1 when there is one.
    """
    from ftlaunch.store.verify import verify

    output = Output(as_json)
    reports = []
    with output.progress() as show:
        for found in _chosen(models):
            reports.append(verify(found, partial(show, f"Checking {found.name}")))  # noqa: PERF401 - slow, not a list
    output.result("\n".join(map(_text, reports)), [asdict(report) for report in reports])
    if not reports:
        output.say("The store is empty. Fetch a first model: ft pull demo")
    return 1 if any(report.faults for report in reports) else 0


def _chosen(models: tuple[str, ...]) -> list[Found]:
    from ftlaunch.store.find import Found, find
    from ftlaunch.store.listing import installed
    from ftlaunch.store.names import weights_path

    if models:
        return [find(name) for name in models]
    return [Found(model.name, weights_path(model.path), "store") for model in installed()]


def _text(report: Report) -> str:
    if report.faults:
        lines = [f"{report.name}: {fault.file} {fault.what}" for fault in report.faults]
        return "\n".join([*lines, f"Try:   {report.remedy}"])
    if report.note:
        return f"{report.name}: nothing wrong was found, but {report.note}"
    return f"{report.name}: whole, {report.hashed} files"
