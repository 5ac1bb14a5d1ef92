"""Processes that may hang or crash, and that somebody listens to without doing so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from ftlaunch import paths


def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """`python -m module`, with its standard output in a pipe. Raises OSError.

    In a group of its own, so that what it starts ends with it, and in no folder whose files could be imported.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if environment.get("PYTHONPATH"):
        folders = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(folder).absolute()) for folder in folders if folder)
    if environment.get("FT_HOME"):
        environment["FT_HOME"] = str(paths.home())
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("FT_DEBUG") == "1" else subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,
    )


def end(child: subprocess.Popen[bytes]) -> None:
    """Killed with all that it started, but not waited for: inside a driver's call a process may not even die."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def own_output() -> TextIO:
    """In such a process: its standard output for itself alone. What libraries print goes nowhere from here on.

    It ends with who started it. Before a driver's library is loaded.
    """
    from ftengine.memory.driver import end_with_parent

    end_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return out
