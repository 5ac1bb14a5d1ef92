"""Compiling ahead, in processes where the interpreter has not run: from Triton 3.8 on it leaves functions replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_kernels_are_compiled_ahead() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "compiling.py")]
    run = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def test_requests_compile_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.specializing"]
    run = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 more with requests" in run.stdout
