"""The group `ft` and its entry point. Knows the commands by name only: a module is imported when its turn comes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from ftengine.errors import FtError
from ftlaunch.cli.errors import report

# name -> (module, one line for `ft --help`); each module holds a click command named `command`
COMMANDS = {
    "launch": ("ftlaunch.cli.launch", "Start a coding agent that a local model answers."),
    "pull": ("ftlaunch.cli.pull", "Fetch a model into the store."),
    "list": ("ftlaunch.cli.list", "Show the models on this machine."),
    "show": ("ftlaunch.cli.show", "Show what a model is, without loading it."),
    "verify": ("ftlaunch.cli.verify", "Check every byte of models against their recorded hashes."),
    "rm": ("ftlaunch.cli.rm", "Remove a model from the store."),
    "checkpoint": ("ftlaunch.cli.checkpoint", "Convert a model into the layout that the engine runs from."),
    "doctor": ("ftlaunch.cli.doctor", "Look for what makes this machine slow, and say what helps."),
    "bench": ("ftlaunch.cli.bench", "Measure this machine and what it serves."),
    "serve": ("ftlaunch.cli.serve", "Serve a model over HTTP until Ctrl-C."),
    "cache": ("ftlaunch.cli.cache", "Show or remove what servers keep of prompts on the disk."),
    "ps": ("ftlaunch.cli.ps", "Show the running servers."),
    "ctl": ("ftlaunch.cli.ctl", "Ask a running server."),
    "stop": ("ftlaunch.cli.stop", "Stop running servers."),
    "version": ("ftlaunch.cli.version", "Show the version."),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from ftlaunch.cli.version import distribution_version

        click.echo(f"ft {distribution_version()}")
        ctx.exit()


@click.group(
    name="ft", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
def ft() -> None:
    """From nothing to a coding agent answered by a Mixture-of-Experts model on your own machine.

    Start with: ft launch claude --model demo

    FT_DEBUG=1 shows the traceback of an error. FT_HOME is the folder of models, logs and records.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 failed, 2 wrong usage, 130 interrupted, or an agent's own."""
    try:
        if os.name == "nt":
            return _refuse_windows()
        _open_standard_streams()
        _check_working_directory()
        status = ft.main(args=None if arguments is None else list(arguments), prog_name="ft", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except Exception as error:
        return report(error)
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """A stream that the caller closed (`>&-`) is None in Python, and a file opened later would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
            os.set_inheritable(number, True)


def _check_working_directory() -> None:
    """In a removed folder no relative path means anything, and PyTorch does not find its own libraries."""
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() is the same
    except FileNotFoundError:
        raise FtError("the folder that this shell is in was removed", "cd to another folder") from None


def _refuse_windows() -> int:
    click.echo("Error: ft runs on Linux, WSL2 and macOS, not on Windows itself.", err=True)
    click.echo("Try:   wsl --install, then install ft inside WSL2", err=True)
    return 1
