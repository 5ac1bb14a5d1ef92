"""kill -9 while records are written, and two servers that write into one folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("rounds", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(rounds: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cache.tiers.crash", str(tmp_path), str(rounds), "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    unfinished, found = map(int, done.stdout.split())
    assert unfinished, "no kill hit a write: the test shows nothing"
    assert found, "nothing survived: the test shows nothing"
