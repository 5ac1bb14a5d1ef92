"""How findings of the doctor are shown: for a terminal, for a pipe, and in a sentence."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ftlaunch.cli.output import Output
    from ftlaunch.machine.verdict import Finding

SCHEMA = 1  # of --json, docs/doctor.md
COLUMNS = ("VERDICT", "GROUP", "WHAT", "FOUND", "COSTS", "TRY")
COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "bad": "red"}
LABEL, INDENT, HANG, WIDEST = 15, 24, 7, 100  # columns


def show(output: Output, found: Sequence[Finding]) -> None:
    if sys.stdout.isatty():
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        text = "\n".join(drawn(found, min(WIDEST, shutil.get_terminal_size().columns)))
        click.echo(text, color=False if plain else None)
    else:
        output.table(COLUMNS, [_row(finding) for finding in found], None, "")


def report(found: Sequence[Finding], quick: bool, seconds: float) -> dict[str, Any]:
    """For --json."""
    from ftlaunch.cli.version import distribution_version
    from ftlaunch.machine.verdict import EXIT, worst

    verdict = worst(found)
    return {
        "schema": SCHEMA,
        "ft": distribution_version(),
        "quick": quick,
        "seconds": round(seconds, 2),
        "verdict": verdict,
        "exit_status": EXIT[verdict],
        "not_known": not_known(found),
        "findings": [finding.as_json() for finding in found],
    }


def drawn(found: Sequence[Finding], width: int) -> Iterator[str]:
    """For a terminal: groups under headings, what costs something in lines below it."""
    from ftlaunch.machine.probe import GROUPS

    for group, findings in groupby(found, key=lambda finding: finding.group):
        yield click.style(GROUPS.get(group, group), bold=True)
        for finding in findings:
            verdict = click.style(f"{finding.verdict:<5}", fg=COLOURS[finding.verdict])
            yield from _wrapped(f"  {verdict} {finding.label:<{LABEL}} ", finding.value, width)
            if finding.cost:
                yield from _wrapped(" " * INDENT + "costs: ", finding.cost, width, HANG)
            if finding.mend:
                yield from _wrapped(" " * INDENT + "try:   ", finding.mend, width, HANG)


def named(found: Sequence[Finding], model: str) -> list[Finding]:
    """With the name that was typed in what is to be typed next of that model."""
    from ftengine.errors import for_model

    return [replace(each, mend=for_model(each.mend, model)) if each.group == "model" else each for each in found]


def not_known(found: Sequence[Finding]) -> list[str]:
    """Names of probes that were ended, broke, or were left out for lack of time."""
    return list(dict.fromkeys(finding.data["probe"] for finding in found if _stands_in(finding)))


def summary(found: Sequence[Finding]) -> str:
    """What is wrong, and what was not looked at: of that nothing can be said."""
    from ftlaunch.machine.probe import BY_NAME
    from ftlaunch.machine.verdict import plural

    bad = sum(finding.verdict == "bad" for finding in found)
    warn = sum(finding.verdict == "warn" and not _stands_in(finding) for finding in found)
    wrong = [f"{plural(bad, 'thing')} not working"] if bad else []
    wrong += [f"{plural(warn, 'thing')} costing speed"] if warn else []
    missing = ", ".join(BY_NAME[name].of for name in not_known(found))
    return f"{', '.join(wrong) or 'Nothing wrong was found'}{f'; not known: {missing}' if missing else ''}."


def _stands_in(finding: Finding) -> bool:
    """For what a probe would have found."""
    return finding.id == f"{finding.group}.answer"


def _wrapped(before: str, text: str, width: int, hang: int = 0) -> list[str]:
    """`text` behind `before`, in lines of at most `width` columns; `hang` more spaces than values have."""
    lines = textwrap.wrap(text, max(20, width - INDENT - hang), break_on_hyphens=False) or [""]
    return [before + lines[0], *(" " * (INDENT + hang) + line for line in lines[1:])]


def _row(finding: Finding) -> list[str]:
    fields = (finding.verdict, finding.group, finding.label, finding.value, finding.cost, finding.mend)
    return [" ".join(text.split()) for text in fields]
