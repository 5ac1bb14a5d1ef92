"""`ft launch`."""

from __future__ import annotations

from typing import Any

import click

from ftlaunch.cli.output import Output, json_option
from ftlaunch.cli.sizes import size

AGENTS = ("claude", "codex", "opencode", "openclaw")


@click.command()
@click.argument("agent", type=click.Choice(AGENTS))
@click.argument("agent_args", metavar="[-- AGENT ARGS]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--model", metavar="NAME|DIR", help="The model.  [default: the running server's, else the newest in the store]"
)
@click.option("--server", metavar="URL", help="Use this running server; its key, if it wants one, from FT_API_KEY.")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Prompt and answer together, for a server that is started.  [default: what fits]",
)
@click.option("--cache-device", type=size, metavar="BYTES", help="As for `ft serve`, for a server that is started.")
@click.option("--cache-host", type=size, metavar="BYTES", help="The same.")
@click.option("--cache-disk", type=size, metavar="BYTES", help="The same; 0: no prompt is written to the disk.")
@click.option("--lean", is_flag=True, help="The agent's small form, for small contexts (claude, codex).")
@click.option("--isolated", is_flag=True, help="Ignore your own configuration of the agent.")
@click.option(
    "--strip",
    type=click.Choice(["models", "all"]),
    default="models",
    show_default=True,
    help="Credentials to hide from the agent: those of model vendors, or also those of clouds and code hosts.",
)
@click.option("--keep", is_flag=True, help="Leave the server that is started running.")
@click.option("--yes", is_flag=True, help="Install or fetch what is missing without asking.")
@click.option("--dry-run", is_flag=True, help="Print what would be set, removed, written and run; do nothing.")
@json_option
def command(
    agent: str, agent_args: tuple[str, ...], as_json: bool, dry_run: bool, yes: bool, strip: str, **chosen: Any
) -> int:
    """Start a coding agent that a local model answers.

    AGENT is claude (Claude Code), codex (Codex CLI), opencode or openclaw. What follows -- goes to the agent.

    Uses the server that runs, or starts one in the background and stops it when the last agent that uses it ends.
    None of your files is changed, so there is nothing to undo; see docs/agents.md. Exits with the agent's status.

    \b
    ft launch claude
    ft launch codex --model demo -- exec "explain main.py"
    ft launch opencode --server http://127.0.0.1:1919
    """
    import os
    from pathlib import Path

    from ftlaunch.launch.request import LaunchRequest

    request = LaunchRequest(
        agent=agent,
        directory=Path.cwd(),
        environ=dict(os.environ),
        user_args=agent_args,
        strip_all=strip == "all",
        interactive=_is_terminal(),
        **chosen,
    )
    output = Output(as_json)
    if dry_run:
        from ftlaunch.launch.dry import dry_run as plan
        from ftlaunch.launch.preview import as_text

        data = plan(request)
        output.result(as_text(data), data)
        return 0
    if as_json:
        raise click.UsageError("--json goes with --dry-run; otherwise the output is the agent's")
    from ftlaunch.launch.request import Talk
    from ftlaunch.launch.run import launch

    return launch(request, Talk(output.say, output.progress, lambda question: yes or _confirm(question)))


def _confirm(question: str) -> bool:
    return _is_terminal() and click.confirm(question, default=True, err=True)


def _is_terminal() -> bool:
    import sys

    return sys.stdin.isatty() and sys.stdout.isatty()
