"""`ft version`."""

from __future__ import annotations

import click

from ftlaunch.cli.output import Output, json_option


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show the version.

    Also names the Python and the system it runs on, as a bug report needs them.
    """
    import platform

    version, python, system = distribution_version(), platform.python_version(), platform.platform(terse=True)
    Output(as_json).result(
        f"ft {version} (Python {python}, {system})", {"version": version, "python": python, "system": system}
    )


def distribution_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("ftlaunch")
    except metadata.PackageNotFoundError:
        return "unknown (run from a folder, not installed)"
