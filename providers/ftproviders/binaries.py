"""Where an agent's program is, and what npm has to fetch when it is nowhere.

Programs are looked for on PATH first, then under ft's own folder `<agents>/<name>/npm`. Nothing is installed globally.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ftproviders.base import Provider

NODE_SPEC = "node@24"  # npm's package of the runtime itself
SCRIPTS = (".js", ".mjs", ".cjs")


@dataclass(frozen=True)
class Program:
    """How to start an agent. `missing` are the npm packages without which `command` cannot be run."""

    command: tuple[str, ...]
    version: str | None  # None: not known
    missing: tuple[str, ...] = ()


def prefix(folder: Path) -> Path:
    """npm's prefix in ft's folder of one agent."""
    return folder / "npm"


def locate(provider: Provider, folder: Path, environ: Mapping[str, str]) -> Program:
    own = prefix(folder) / "node_modules" / ".bin" / provider.executable
    path = environ.get("PATH", os.defpath)
    found = shutil.which(provider.executable, path=path) or (str(own) if os.access(own, os.X_OK) else None)
    command: tuple[str, ...] = (found or str(own),)
    missing: tuple[str, ...] = () if found else (provider.npm.spec,)
    if provider.needs_own_node and (found is None or Path(found).resolve().suffix in SCRIPTS):
        node = find_node(provider, folder, path)
        missing = (*((NODE_SPEC,) if node is None else ()), *missing)
        command = (node or str(own.with_name("node")), *command)
    return Program(command, installed_version(provider, Path(found)) if found else None, missing)


def find_node(provider: Provider, folder: Path, path: str) -> str | None:
    """A node that the provider runs on: the one on PATH, else the one in ft's folder."""
    own = prefix(folder) / "node_modules" / ".bin" / "node"
    for candidate in (shutil.which("node", path=path), str(own)):
        if candidate and os.access(candidate, os.X_OK) and provider.runs_on_node(_node_version(candidate)):
            return candidate
    return None


def _node_version(node: str) -> tuple[int, int]:
    try:
        said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        major, minor = said.strip().removeprefix("v").split(".")[:2]
        return int(major), int(minor)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0, 0


def installed_version(provider: Provider, program: Path) -> str | None:
    """The version that the npm package around `program` states."""
    for folder in program.resolve().parents[:4]:
        try:
            manifest = json.loads((folder / "package.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(manifest, dict) and manifest.get("name") == provider.npm.package:
            return str(manifest.get("version"))
    return None


def npm_command(npm: str, into: Path, packages: tuple[str, ...]) -> tuple[str, ...]:
    return (npm, "install", "--prefix", str(into), "--no-audit", "--no-fund", "--loglevel=error", *packages)
