"""Getting an agent's program: found, or installed by npm into ft's own folder after asking."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ftengine.errors import FtError
from ftengine.locks import locked
from ftlaunch import paths
from ftlaunch.launch.request import Talk
from ftproviders import Provider, binaries
from ftproviders.binaries import Program


def folder(provider: Provider) -> Path:
    """ft's own folder for this agent."""
    return paths.agents() / provider.name


def obtain(provider: Provider, environ: Mapping[str, str], talk: Talk) -> Program:
    """The agent's program; with the person's consent it is installed first.

    Raises FtError with the command to type when it is missing and nobody agreed to install it.
    """
    program = binaries.locate(provider, folder(provider), environ)
    if not program.missing:
        return program
    npm = shutil.which("npm", path=environ.get("PATH", os.defpath))
    what = " and ".join(program.missing)
    if npm is None:
        raise FtError(
            f"{provider.title} needs {what}, and npm, which would fetch it, is not installed",
            f"install Node.js 22 or newer (it brings npm), then: ft launch {provider.name}",
        )
    into = binaries.prefix(folder(provider))
    shown = shlex.join(binaries.npm_command("npm", into, program.missing))
    if not talk.confirm(f"{provider.title} needs {what}. Install into {into}?"):
        raise FtError(
            f"{provider.title} needs {what}, which is not installed",
            f"ft launch {provider.name} --yes   (runs: {shown})",
        )
    with locked(into.with_suffix(".lock"), lambda: talk.say(f"Waiting for another ft that installs {provider.title}")):
        program = binaries.locate(provider, folder(provider), environ)
        if program.missing:
            talk.say(f"Installing {what} into {into}")
            _install(npm, into, program.missing, environ)
            program = binaries.locate(provider, folder(provider), environ)
    if program.missing:
        raise FtError(f"npm ended well, but {program.command[-1]} is not there", f"look into {into}")
    return program


def _install(npm: str, into: Path, packages: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """All or nothing: npm works in a folder beside `into`, which takes its name when npm is done."""
    paths.private(into.parent)
    draft = Path(tempfile.mkdtemp(prefix=".partial-npm-", dir=into.parent))
    # An agent's install script may run the Node.js that is installed with it: that one comes first, and alone.
    runtime = tuple(package for package in packages if package == binaries.NODE_SPEC)
    rest = tuple(package for package in packages if package not in runtime)
    search = os.pathsep.join([str(draft / "node_modules" / ".bin"), environ.get("PATH", os.defpath)])
    try:
        if into.is_dir():
            shutil.copytree(into, draft, symlinks=True, dirs_exist_ok=True)
        for group in filter(None, (runtime, rest)):
            _npm(binaries.npm_command(npm, draft, group), {**environ, "PATH": search})
        old = into.with_name(f".old-{draft.name.rpartition('-')[2]}")
        if into.is_dir():
            into.rename(old)
        draft.rename(into)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _npm(command: tuple[str, ...], environ: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if "error" in line.lower()), "it said nothing")
        raise FtError(f"npm could not install {command[-1]}: {reason.strip()[:300]}", shlex.join(command))
