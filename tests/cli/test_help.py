"""The help is the documentation: docs/cli.md equals it, and the group's overview equals the commands' own words."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ftlaunch.cli import docs
from ftlaunch.cli.app import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_equals_the_help() -> None:
    assert PAGE.read_text(encoding="utf-8") == docs.text(), "run: python -m ftlaunch.cli.docs > docs/cli.md"


def test_check_finds_a_difference(tmp_path: Path) -> None:
    stale = tmp_path / "cli.md"
    stale.write_text(PAGE.read_text(encoding="utf-8").replace("--model", "--modell", 1), encoding="utf-8")
    for page, status in ((PAGE, 0), (stale, 1)):
        done = subprocess.run(
            [sys.executable, "-m", "ftlaunch.cli.docs", "--check", str(page)], capture_output=True, text=True
        )
        assert done.returncode == status, done.stdout + done.stderr
    assert "-" in done.stdout
    assert "--modell" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_overview(name: str) -> None:
    module, line = COMMANDS[name]
    command = importlib.import_module(module).command
    assert isinstance(command, click.Command)
    assert command.help is not None
    assert command.help.splitlines()[0] == line
    assert all(option.help for option in command.params if isinstance(option, click.Option) and not option.hidden)
