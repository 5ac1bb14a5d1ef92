"""`ft bench decode`, `prefill`, `load` and `agent`: a served model, measured as its clients see it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ftlaunch.cli.output import Output, json_option
from ftlaunch.cli.sizes import Share

if TYPE_CHECKING:
    from ftlaunch.bench.place import Place, Show, Started
    from ftlaunch.bench.report import Report

Function = TypeVar("Function", bound=Callable[..., Any])

PROMPTS = ("code", "tokens")  # ftlaunch.bench.prompts.KINDS, which is slower to import
MOST_TOKENS, MOST_STREAMS, MOST_RUNS, MOST_TURNS = 10_000_000, 256, 1000, 100
SERVED_NAME = "ft-bench"  # a launch looks for a server by its model's name, and must not join one that is measured
TOKENS = click.IntRange(1, MOST_TOKENS)
RUNS = click.IntRange(1, MOST_RUNS)


def numbers(most: int) -> Callable[[str], tuple[int, ...]]:
    """The type of an option such as 1,4,8: whole numbers from 1 to `most`."""

    def convert(text: str) -> tuple[int, ...]:
        found = tuple(int(word) if word.strip().isdecimal() else 0 for word in text.split(","))
        if not all(1 <= number <= most for number in found):
            raise click.BadParameter(f"{text[:40]!r} is not numbers from 1 to {most}, with commas between them")
        return found

    return convert


@dataclass(frozen=True)
class Asked:
    """The options that all four have."""

    which: str | None
    url: str | None
    api_key: str | None
    model: str | None
    flags: tuple[str, ...]
    turns: int | None
    against: Path | None
    plot: Path | None
    as_json: bool

    @classmethod
    def take(cls, options: dict[str, Any]) -> Asked:
        """Out of a command's options, which keep the others."""
        return cls(**{name: options.pop(name, None) for name in cls.__dataclass_fields__})

    @property
    def turns_meant(self) -> int:
        return self.turns or (2 if len(self.flags) > 1 else 1)


START = (
    click.option("--model", metavar="NAME|DIR|FILE", help="Start a server of this model, and stop it at the end."),
    click.option(
        "--flags",
        multiple=True,
        metavar='"FLAGS"',
        help="Flags of ft serve, in quotes. Given again: another server, measured in turns with the first.",
    ),
    click.option(
        "--turns",
        type=click.IntRange(1, MOST_TURNS),
        metavar="N",
        help="Times that each server is measured.  [default: 2 with several --flags, else 1]",
    ),
)
FIND = (
    click.argument("which", metavar="[NAME|PORT]", required=False),
    click.option("--url", metavar="URL", help="A server at this address, of any make, instead of one on this machine."),
    click.option(
        "--api-key", envvar="FT_API_KEY", show_envvar=True, metavar="KEY", help="What the server at --url wants."
    ),
)
END = (
    click.option(
        "--against",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE.json",
        help="Compare with what an earlier --json printed.",
    ),
    json_option,
)
PLOT = click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw the result, too. Needs matplotlib."
)


def runs_option(default: int, what: str = "Samples of each case.") -> Callable[[Function], Function]:
    return click.option("--runs", type=RUNS, default=default, show_default=True, metavar="N", help=what)


WARMUP = click.option(
    "--warmup",
    type=click.IntRange(0, MOST_RUNS),
    default=1,
    show_default=True,
    metavar="N",
    help="Runs before them that are not counted.",
)
KIND = click.option(
    "--prompts",
    type=click.Choice(PROMPTS),
    default="code",
    show_default=True,
    help="Program text, or tokens drawn at random, which give exact lengths and choose experts as no text does.",
)


def _with(*decorators: Callable[[Any], Any]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


@click.command("decode")
@_with(*FIND, *START)
@click.option("--prompt", type=TOKENS, default=512, show_default=True, metavar="TOKENS", help="Prompt of each stream.")
@click.option(
    "--output",
    type=click.IntRange(2, MOST_TOKENS),
    default=128,
    show_default=True,
    metavar="TOKENS",
    help="Answer of each.",
)
@click.option(
    "--streams", type=numbers(MOST_STREAMS), default="1", show_default=True, metavar="N,N", help="Answers at once."
)
@click.option("--temperature", type=Share(0, 2), default=1.0, show_default=True, help="Of sampling.")
@_with(KIND, runs_option(3), WARMUP, PLOT, *END)
def decode(**options: Any) -> None:
    """Measure how fast a served model writes.

    Tokens a second of all streams together, from each one's first token to its last, and the gaps between the pieces
    that arrive. The prompts are in the cache by then. NAME or PORT is a running server; with neither, the only one.

    Two strategies: ft bench decode --model M --flags "--moe-backend hybrid" --flags "--moe-backend cpu"
    """
    asked = Asked.take(options)
    from ftlaunch.bench.decode import Decode, measure

    _measure("decode", measure, Decode(**options), asked)


@click.command("prefill")
@_with(*FIND, *START)
@click.option(
    "--cold",
    type=numbers(MOST_TOKENS),
    default="128,512,2048",
    show_default=True,
    metavar="TOKENS,…",
    help="Lengths of prompts that no cache knows.",
)
@click.option(
    "--prefix", type=TOKENS, default=2048, show_default=True, metavar="TOKENS", help="Length of a prompt that it knows."
)
@click.option(
    "--new",
    type=numbers(MOST_TOKENS),
    default="16,64,256",
    show_default=True,
    metavar="TOKENS,…",
    help="New tokens behind that prompt.",
)
@_with(KIND, runs_option(3), WARMUP, PLOT, *END)
def prefill(**options: Any) -> None:
    """Measure how fast a served model reads prompts.

    The time to the first token (TTFT): of prompts that begin as none before, and of known ones with new tokens behind.
    How much was known is the server's own count. NAME or PORT is a running server; with neither, the only one.
    """
    asked = Asked.take(options)
    from ftlaunch.bench.prefill import Prefill, measure

    _measure("prefill", measure, Prefill(**options), asked)


@click.command("agent")
@_with(*FIND, *START)
@click.option(
    "--prefix", type=TOKENS, default=2000, show_default=True, metavar="TOKENS", help="Length of the system prompt."
)
@click.option(
    "--results",
    type=numbers(MOST_TOKENS),
    default="300,16,64,128,300,16,64,128",
    show_default=True,
    metavar="TOKENS,…",
    help="Lengths of the tools' results, a step each.",
)
@click.option(
    "--output", type=TOKENS, default=64, show_default=True, metavar="TOKENS", help="Most that the model says in a step."
)
@_with(runs_option(3, "Conversations."), WARMUP, PLOT, *END)
def agent(**options: Any) -> None:
    """Measure a coding agent's loop.

    A conversation with tools that grows by what the model says and by scripted results: the time to the first token of
    each step, and how much of its prompt was reused. The last request is sent twice. NAME or PORT is a running server;
    with neither, the only one.
    """
    asked = Asked.take(options)
    from ftlaunch.bench.agent import Agent, measure

    _measure("agent", measure, Agent(**options), asked)


@click.command("load")
@_with(*START)
@click.option("--cold/--no-cold", default=True, show_default=True, help="Also with the files out of the page cache.")
@_with(runs_option(3, "Starts of each kind."), *END)
def load(**options: Any) -> None:
    """Measure how long a server takes until it is ready.

    Starts and stops one several times: until it listens, until the model is loaded, and its first answer; then the
    engine's own stages. A start before them all is not counted. Kernels and profile.json stay in their caches.
    """
    asked = Asked.take(options)
    if asked.model is None:
        raise click.UsageError("Missing option '--model': a start can be measured of a server that is started only")
    from ftlaunch.bench.load import Load
    from ftlaunch.bench.turns import loaded

    settings = Load(**options)
    output = Output(asked.as_json)
    if settings.cold and not hasattr(os, "posix_fadvise"):
        output.say("This system cannot be asked to give up cached files: warm starts only.")
        settings = Load(settings.runs, cold=False)
    places = _started(asked.model, asked.flags)
    _run("load", asked, output, lambda show: loaded(settings, places, asked.turns_meant, show))


def _measure(bench: str, measure: Callable[..., Any], settings: Any, asked: Asked) -> None:
    from ftlaunch.bench.turns import measured

    if asked.plot is not None:
        from ftlaunch.bench.plot import check

        check(asked.plot)
    output = Output(asked.as_json)
    places = _places(asked, f"ft bench {bench}")
    _run(bench, asked, output, lambda show: measured(bench, measure, settings, places, asked.turns_meant, show))


def _run(bench: str, asked: Asked, output: Output, measure: Callable[[Show], Report]) -> None:
    from ftlaunch.bench.compare import compare_earlier
    from ftlaunch.bench.report import load_report

    earlier = load_report(asked.against, bench) if asked.against is not None else None
    with output.progress() as show:
        report = measure(show)
    if earlier is not None:
        report.comparisons += compare_earlier(earlier, report)
    _show(report, earlier, output)
    if asked.plot is not None:
        from ftlaunch.bench.plot import draw

        draw([report] if earlier is None else [report, earlier], asked.plot)
        output.say(f"Drawn: {asked.plot}")


def _show(report: Report, earlier: Report | None, output: Output) -> None:
    from ftlaunch.bench.table import heading, notes, other_settings, rows

    if output.as_json:
        output.result("", report.as_json())
    else:
        output.lines(heading(report))
        output.table(*rows(report), None, "")
        output.lines(notes(report))
    if earlier is not None:
        if earlier.machine != report.machine:
            output.say(f"The earlier figures come from another machine: {earlier.machine}.")
        if others := other_settings(earlier, report):
            output.say(f"The earlier run had other settings: {others}.")
        if not any(one.first.startswith("earlier ") for one in report.comparisons):
            output.say("No case of the earlier run was measured now: nothing is compared.")
            return
        output.say(f"The earlier figures are of {earlier.date}: what the machine did then is not in the spread.")


def _places(asked: Asked, command: str) -> Sequence[Place]:
    """Raises UsageError for options that contradict each other, and FtError."""
    from ftlaunch.bench.place import address, running

    ways = {"NAME or PORT": asked.which, "--url": asked.url, "--model": asked.model}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} name different servers: give one of them")
    if asked.flags and asked.model is None:
        raise click.UsageError("--flags start a server, which needs --model")
    if asked.url is not None:
        return [address(asked.url, asked.api_key)]
    if asked.model is not None:
        return _started(asked.model, asked.flags)
    from ftlaunch.cli.which import server_meant

    return [running(server_meant(asked.which, command))]


def _started(model: str, flags: Sequence[str]) -> list[Started]:
    """All flags are read before anything starts. Raises click's errors for wrong ones, and FtError."""
    from ftlaunch.bench.place import Started
    from ftlaunch.cli.flags import serve_options, words
    from ftlaunch.store import resolve

    directory = str(resolve(model))
    found = []
    for text in flags or ("",):
        asked = words(text, "is chosen by ft bench")
        # What is measured is not worth keeping on the disk, and would push out what is.
        given = [] if any(word.partition("=")[0] == "--cache-disk" for word in asked) else ["--cache-disk", "0"]
        named = ["--model", directory, "--port", "0", "--served-model-name", SERVED_NAME]
        found.append(Started(model, shlex.join(asked), serve_options([*named, *given, *asked])))
    return found
