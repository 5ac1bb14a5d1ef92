"""Benches of the GPU as programs where there is no GPU, Triton or PyTorch: what they take, and what they lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftengine.bench import gpu_options

FOLDER = Path(gpu_options.__file__).parent
BENCHES = sorted({path.stem for path in FOLDER.glob("gpu_*.py")} - {"gpu_options"})
# As `python -m`, with packages that cannot be imported
RUN = "import runpy, sys; sys.modules |= {name: None for name in ('torch', 'triton')}; sys.argv = sys.argv[1:]; "
RUN += "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


def run(bench: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, f"ftengine.bench.{bench}", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("bench", BENCHES)
def test_what_it_takes(bench: str) -> None:
    done = run(bench, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m ftengine.bench.{bench} ")
    assert run(bench, "--nothing").returncode == 2


@pytest.mark.parametrize("bench", BENCHES)
def test_what_it_lacks(bench: str) -> None:
    done = run(bench, *(["a folder"] if bench == "gpu_check" else []))
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"Error: {bench} needs a GPU: ")
    assert second == "Try:   ft doctor"
