"""What printing help or a plan may import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.serving import SCRIPTED_CHECKPOINT

CHECK = """
import sys
from ftlaunch.cli import main
status = main({arguments!r})
heavy = {{"torch", "numpy", "transformers", "starlette", "uvicorn", "tokenizers"}} & sys.modules.keys()
assert not heavy, heavy
sys.exit(status)
"""


@pytest.mark.parametrize(
    "arguments",
    [["launch", "--help"], ["launch", "claude", "--dry-run", "--model", str(SCRIPTED_CHECKPOINT)]],
)
def test_no_heavy_module(arguments: list[str], tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(arguments=arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
