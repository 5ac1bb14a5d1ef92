"""The command `ft`: one module per command, found by name when it is typed."""

from ftlaunch.cli.app import main

__all__ = ["main"]
