"""`ft cache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ftlaunch.cli.output import Output, json_option

if TYPE_CHECKING:
    from ftengine.cache.tiers.survey import Kept
    from ftlaunch.prompts import Overview

COLUMNS = ("MODEL", "SIZE", "SESSIONS", "USED", "SINCE", "MADE WITH")


@click.command()
@click.argument("action", type=click.Choice(["show", "clear"]), default="show")
@click.option("--model", metavar="NAME|DIR|FILE", help="Only what was kept for this model.")
@click.option("--yes", is_flag=True, help="clear: do not ask.")
@json_option
def command(action: str, model: str | None, yes: bool, as_json: bool) -> None:
    """Show or remove what servers keep of prompts on the disk.

    show, which is also what `ft cache` alone does: one row for each model and what else its states depend on; how much
    it takes, of how many sessions it is, when it was used last, how far back it goes, and what computed it.

    clear removes it. Servers may run meanwhile: what they hold in memory they go on using, and may write again.
    ft serve --cache-disk 0 keeps nothing there. See docs/prompts.md.
    """
    from ftlaunch.prompts import overview
    from ftlaunch.store import canonical

    output = Output(as_json)
    name = None if model is None else canonical(model)
    found = overview(name)
    if action == "clear":
        _clear(output, found, name, yes)
    else:
        _show(output, found, name)


def _show(output: Output, found: Overview, model: str | None) -> None:
    from ftlaunch import paths
    from ftlaunch.cli.list import size

    data: dict[str, Any] = {
        "folder": str(paths.prompts()),
        "bytes": found.bytes,
        "prompts": [_facts(each) for each in found.kept],
        "answers": {"files": len(found.answers), "bytes": sum(entry.size for entry in found.answers)},
        "unreadable": [str(path) for path in found.unreadable],
    }
    nothing = "" if found.answers or found.unreadable else f"Nothing is kept {_of(model)}in {paths.prompts()}."
    output.table(COLUMNS, [_row(each) for each in found.kept], data, nothing)
    if output.as_json:
        return
    if found.answers:
        output.say(f"Answers as the models wrote them: {size(data['answers']['bytes'])}.")
    if found.kept or found.answers:
        output.say(f"{size(found.bytes)} in {paths.prompts()}. Remove it: ft cache clear")
    for path in found.unreadable:
        output.say(f"{path} cannot be read.")


def _clear(output: Output, found: Overview, model: str | None, yes: bool) -> None:
    from ftengine.errors import FtError
    from ftlaunch import paths
    from ftlaunch.cli.list import size
    from ftlaunch.prompts import remove

    if found.unreadable:
        path = found.unreadable[0]
        raise FtError(f"{path} cannot be read, so nothing was removed", f"rm -r {path}, then ft cache clear")
    if not found.kept and not found.answers:
        output.result(f"Nothing is kept {_of(model)}in {paths.prompts()}.", {"freed": 0})
        return
    what = f"{size(found.bytes)} of prompts and answers {_of(model)}".rstrip()
    if not yes:
        if not _is_terminal():
            raise FtError("nothing was removed: there is nobody to ask", "ft cache clear --yes")
        if not click.confirm(f"Remove {what}?", default=False, err=True):
            output.say("Nothing was removed.")
            return
    freed = remove(found)
    output.result(f"Removed {size(freed)} of prompts and answers.", {"freed": freed})


def _facts(kept: Kept) -> dict[str, Any]:
    import msgspec

    return {
        "key": kept.key,
        "model": None if kept.identity is None else kept.identity.model,
        "bytes": kept.bytes,
        "records": kept.records,
        "sessions": kept.sessions,
        "last_used": round(kept.used) or None,
        "oldest": round(kept.made) or None,
        "identity": msgspec.to_builtins(kept.identity),
    }


def _row(kept: Kept) -> list[str]:
    from ftlaunch.cli.list import ago, size

    identity = kept.identity
    return [
        "(not known)" if identity is None else identity.model,
        size(kept.bytes),
        str(kept.sessions),
        ago(kept.used or None),
        ago(kept.made or None),
        "-" if identity is None else f"{identity.dtype}, {identity.device}, ft {identity.version}",
    ]


def _of(model: str | None) -> str:
    return "" if model is None else f"of {model} "


def _is_terminal() -> bool:
    import sys

    return sys.stdin.isatty() and sys.stderr.isatty()
