"""`ft doctor`."""

from __future__ import annotations

import time

import click

from ftlaunch.cli.output import Output, json_option


@click.command()
@click.option("--model", metavar="NAME|DIR|FILE", help="Also say whether this model fits, and how it would be served.")
@click.option("--quick", is_flag=True, help="Only look, and measure nothing but the disk: under 2 s.")
@json_option
def command(model: str | None, quick: bool, as_json: bool) -> int:
    """Look for what makes this machine slow, and say what helps.

    CPU, memory, limits, disk, GPU and its link, what is installed, agents, port and store: what was found, a verdict,
    and where something is wrong what it costs and the command or setting that mends it. Measures how fast memory and
    disk are read and what crosses the link to the GPU. Takes less than 15 s.

    Exits with 0 where nothing is wrong, 3 where something costs speed, 4 where something does not work.
    """
    from ftlaunch.cli import findings
    from ftlaunch.machine.probe import Asked
    from ftlaunch.machine.run import examine
    from ftlaunch.machine.verdict import EXIT, worst

    output, began = Output(as_json), time.monotonic()
    asked = Asked(quick, None if model is None else _path(model))
    if not quick:
        output.say("Looking at this machine; a measurement is the better the less else it does")
    found = examine(asked, (lambda text: None) if quick else output.say)
    found = found if model is None else findings.named(found, model)
    if as_json:
        output.result("", findings.report(found, quick, time.monotonic() - began))
    else:
        findings.show(output, found)
    output.say(findings.summary(found))
    return EXIT[worst(found)]


def _path(model: str) -> str:
    """Raises FtError for a model that is not on this machine."""
    from ftlaunch.store import resolve

    return str(resolve(model))
