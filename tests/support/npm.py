"""The four agents at the versions the tests were written against, installed from npm into a cache folder.

The folder is `.cache/agents` in the repository, or FT_TEST_AGENTS_DIR. Where npm is missing or the installation fails
the tests skip with the reason; FT_REQUIRE_AGENTS=1 (continuous integration) makes that a failure.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODE = ("node", "24")  # OpenClaw wants 24.16 or later; any 24 of npm's is later
AGENTS = (
    ("@anthropic-ai/claude-code", "2.1.332"),
    ("@openai/codex", "0.171.0"),
    ("opencode-ai", "1.18.33"),
    ("openclaw", "2026.9.6"),
)
INSTALL_TIMEOUT = 600  # seconds; 1.9 GB unpacked


@dataclass(frozen=True)
class InstalledAgents:
    folder: Path

    @property
    def bin(self) -> Path:
        """`claude`, `codex`, `opencode`, `openclaw` and the `node` that runs them: to be put first on PATH."""
        return self.folder / "node_modules" / ".bin"


def installed_agents() -> InstalledAgents:
    """Installs what is missing, once for all processes that ask at the same time; skips or fails when it cannot."""
    folder = Path(os.environ.get("FT_TEST_AGENTS_DIR") or ROOT / ".cache" / "agents")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _install_missing(folder)
        except _NotInstalledError as error:
            if os.environ.get("FT_REQUIRE_AGENTS") == "1":
                pytest.fail(f"FT_REQUIRE_AGENTS=1: {error}")
            pytest.skip(str(error))
    return InstalledAgents(folder)


class _NotInstalledError(Exception):
    pass


def _install_missing(folder: Path) -> None:
    # Node first: OpenClaw's own install script refuses to run under an older one.
    for packages in ([NODE], list(AGENTS)):
        missing = [package for package in packages if not _is_there(folder, *package)]
        if missing:
            _npm_install(folder, [f"{name}@{version}" for name, version in missing])


def _is_there(folder: Path, name: str, version: str) -> bool:
    manifest = folder / "node_modules" / name / "package.json"
    if not manifest.is_file():
        return False
    there = json.loads(manifest.read_text(encoding="utf-8"))["version"]
    return there == version or there.startswith(version + ".")


def _npm_install(folder: Path, packages: list[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise _NotInstalledError("npm is not on PATH, so the agents cannot be installed")
    path = f"{folder / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--save-exact", *packages]
    try:
        done = subprocess.run(
            command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=INSTALL_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise _NotInstalledError(f"npm install did not end within {INSTALL_TIMEOUT} s: {packages}") from None
    if done.returncode != 0:
        raise _NotInstalledError(f"npm install {' '.join(packages)} failed: {done.stderr.strip()[-500:]}")
