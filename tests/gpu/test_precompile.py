"""Compiling ahead, in a process where the interpreter has not run: from Triton 3.8 on it leaves functions replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_kernels_are_compiled_ahead() -> None:
    cases = Path(__file__).with_name("compiling.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    run = subprocess.run(command, cwd=cases.parents[2], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
