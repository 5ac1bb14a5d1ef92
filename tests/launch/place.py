"""A user's machine in a temporary folder: home with configurations, repository, FT_HOME, and doubles of the agents."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.serving import FT, scripted_environment

DOUBLE = Path(__file__).with_name("fake_agent.py")
AGENTS = ("claude", "codex", "opencode", "openclaw")
CONFIGURATION = {
    ".claude/settings.json": '{"env": {"ANTHROPIC_BASE_URL": "http://192.0.2.1"}, "model": "opus"}',
    ".claude.json": '{"hasCompletedOnboarding": true, "numStartups": 5}',
    ".codex/config.toml": 'model = "gpt-5.6"\nmodel_provider = "evil"\n',
    ".config/opencode/opencode.json": '{"model": "evil/m"}',
    ".local/share/opencode/auth.json": '{"anthropic": {"type": "api", "key": "sk-user"}}',
    ".openclaw/openclaw.json": '{ /* mine */ "agents": {} }',
}
PATIENCE = 60.0  # seconds


@dataclass(frozen=True)
class Place:
    home: Path
    repository: Path
    ft_home: Path
    bin: Path
    report: Path
    environment: dict[str, str]

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*FT, *arguments],
            cwd=self.repository,
            env={**self.environment, **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **extra)
        out, error = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(arguments, process.returncode, out, error)

    def seen(self, report: Path | None = None) -> dict[str, Any]:
        """What the double of the agent was given; waits for it."""
        path = report or self.report
        until(path.exists, f"{path} appears")
        facts = json.loads(path.read_text())
        assert isinstance(facts, dict)
        return facts

    def servers(self) -> list[dict[str, Any]]:
        listed = json.loads(self.run("ps", "--json").stdout)
        assert isinstance(listed, list)
        return listed


def make_place(folder: Path) -> Place:
    home, repository, binaries = folder / "home", folder / "repository", folder / "bin"
    for path in (home, repository, binaries):
        path.mkdir()
    for name, text in CONFIGURATION.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (repository / "AGENTS.md").write_text("the user's own\n")
    for agent in AGENTS:
        add_double(binaries, agent)
    known = scripted_environment(folder / "ft")
    environment = {
        **{name: known[name] for name in ("FT_HOME", "FT_PLUGINS", "PYTHONPATH")},
        "HOME": str(home),
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "DOUBLE_REPORT": str(folder / "report"),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
    }
    return Place(home, repository, folder / "ft", binaries, folder / "report", environment)


def add_double(binaries: Path, name: str) -> Path:
    """As a shell script, so that the double needs no interpreter on the child's PATH."""
    path = binaries / name
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{DOUBLE}" "$@"\n')
    path.chmod(0o755)
    return path


def tree(*folders: Path) -> dict[str, str]:
    """Every path below the folders with its kind, mode and content."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = f"{path.lstat().st_mode:o} {content}"
    return found


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience:.0f} s: {what}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
