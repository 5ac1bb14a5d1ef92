"""`ft rm`."""

from __future__ import annotations

import click

from ftlaunch.cli.output import Output, json_option


@click.command()
@click.argument("model", metavar="NAME")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def command(model: str, yes: bool, as_json: bool) -> None:
    """Remove a model from the store.

    Says what that frees and asks first. What an interrupted pull of the model left goes too, and so do the prompts that
    were kept for it (ft cache). A model that a server uses stays, and so does everything outside the store: of a link
    only the link is removed.
    """
    from ftengine.errors import FtError
    from ftlaunch import prompts
    from ftlaunch.cli.list import size
    from ftlaunch.store.remove import carry_out, plan

    output = Output(as_json)
    removal = plan(model)
    what = f"the link to {removal.link}" if removal.link else f"{removal.path} ({size(removal.bytes)})"
    kept = None if removal.link else prompts.overview(removal.name)
    if kept is not None and kept.bytes:
        what += f" and {size(kept.bytes)} of its prompts"
    if not yes:
        if not _is_terminal():
            raise FtError(f"nothing was removed: there is nobody to ask whether {model} may go", f"ft rm {model} --yes")
        if not click.confirm(f"Remove {what}?", default=False, err=True):
            output.say("Nothing was removed.")
            return
    carry_out(removal, lambda: output.say(f"Waiting for another ft that works on {model}"))
    freed = removal.bytes + (prompts.remove(kept) if kept is not None and kept.bytes else 0)
    data = {"name": removal.name, "path": str(removal.path), "freed": freed}
    output.result(f"Removed {what}.", data)


def _is_terminal() -> bool:
    import sys

    return sys.stdin.isatty() and sys.stderr.isatty()
