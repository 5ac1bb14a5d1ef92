"""`ft stop`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftlaunch.cli.output import Output, json_option

if TYPE_CHECKING:
    from ftlaunch.servers import ServerRecord


@click.command()
@click.argument("which", metavar="[NAME|PORT]", required=False)
@click.option("--all", "everything", is_flag=True, help="Stop all servers.")
@json_option
def command(which: str | None, everything: bool, as_json: bool) -> None:
    """Stop running servers.

    NAME is a model's name or directory, PORT the port a server listens on. With neither, the only running server is
    stopped; when there are several, they are listed instead.
    """
    from ftlaunch.servers import stop

    output = Output(as_json)
    stopped = []
    for record in _chosen(which, everything):
        stop(record)
        stopped.append({"id": record.id, "model": record.served_name, "pid": record.pid, "url": record.url})
    lines = [f"Stopped {server['model']} at {server['url']} (pid {server['pid']})." for server in stopped]
    output.result("\n".join(lines), stopped)
    if not stopped:
        output.say("No server runs.")


def _chosen(which: str | None, everything: bool) -> list[ServerRecord]:
    """Raises UsageError for a contradiction, FtError when nothing or no single server is meant."""
    from ftlaunch.cli.which import servers_meant
    from ftlaunch.servers import lost, running

    if which is not None and everything:
        raise click.UsageError("give a name or port, or --all, not both")
    return running() + lost() if everything else servers_meant(which, "ft stop NAME, ft stop PORT or ft stop --all")
