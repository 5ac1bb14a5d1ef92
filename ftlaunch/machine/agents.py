"""Node.js, npm and the agents: their versions, and whether they are those that ft knows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ftlaunch import paths
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.verdict import Finding
from ftproviders import binaries
from ftproviders.base import Provider
from ftproviders.binaries import Program
from ftproviders.registry import PROVIDERS

SECONDS = 5.0
OLDEST = 22  # of Node.js, that Claude Code says it needs
NEWER = f"install Node.js {OLDEST} or newer"
LEADING = re.compile(r"\d+")


def probe(asked: Asked) -> Iterator[Finding]:
    yield node()
    with ThreadPoolExecutor(len(PROVIDERS)) as threads:  # each may ask a Node.js for its version
        for provider, program in zip(PROVIDERS.values(), threads.map(_locate, PROVIDERS.values()), strict=True):
            yield agent(provider, program)


def node() -> Finding:
    path, npm = shutil.which("node"), shutil.which("npm")
    found = _version(path) if path else None
    data = {"node": found, "path": path, "npm": npm}
    if npm is None:
        value = f"{found or 'not installed'}, no npm"
        cost = "agents that are not installed cannot be fetched"
        return Finding("agents.node", "Node.js", value, "note", cost, NEWER, data)
    if found and (major := LEADING.match(found)) and int(major[0]) < OLDEST:
        cost = "newer releases of the agents may not start"
        return Finding("agents.node", "Node.js", f"{found}, npm at {npm}", "note", cost, NEWER, data)
    return Finding("agents.node", "Node.js", f"{found or 'of unknown version'}, npm at {npm}", data=data)


def agent(provider: Provider, program: Program) -> Finding:
    id, wanted = f"agents.{provider.name}", provider.npm
    data = {"version": program.version, "missing": list(program.missing), "tested": wanted.tested}
    if program.missing:
        value = "not installed" if wanted.spec in program.missing else f"needs {' and '.join(program.missing)}"
        if shutil.which("npm") is not None:  # else agents.node tells what is needed to fetch it
            value += f", ft launch {provider.name} offers to fetch it"
        return Finding(id, provider.title, value, data=data)
    value = program.version or "of unknown version"
    if program.version is not None and not wanted.supports(program.version):
        cost = "its settings may have changed since"
        mend = f"ft launch {provider.name} --dry-run shows what it is given"
        return Finding(id, provider.title, f"{value}, tested is {wanted.tested}", "note", cost, mend, data)
    return Finding(id, provider.title, value, data=data)


def _locate(provider: Provider) -> Program:
    return binaries.locate(provider, paths.agents() / provider.name, os.environ)


def _version(program: str) -> str | None:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip().removeprefix("v")[:40] or None
