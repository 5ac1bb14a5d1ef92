"""Programs of C++ built under a sanitizer and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = (os.environ.get("CXX"), "c++", "g++", "clang++")
COMPILER = next((name for name in COMPILERS if name and shutil.which(name)), None)


def build(program: Path, sanitizer: str, source: Path, *library: str) -> Path:
    """From `source` and files of csrc/. Raises AssertionError with the compiler's words."""
    assert COMPILER is not None
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    flags += [f"-fsanitize={sanitizer}"] if sanitizer else []
    sources = [source, *(ROOT / "csrc" / name for name in library)]
    command = [COMPILER, *flags, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return program


def execute(program: Path) -> subprocess.CompletedProcess[str]:
    # The child of a fork may use threads of its own: that is part of what is tested.
    # Leaks are not looked for: a child that ends while its team works is part of it too, and what running threads hold
    # then counts as leaked where the system does not let them be stopped.
    environment = os.environ | {"TSAN_OPTIONS": "die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, env=environment)
    if "unexpected memory mapping" in done.stderr and shutil.which("setarch"):
        # Kernels that place memory more randomly than an old thread sanitizer expects.
        command = ["setarch", "-R", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    return done


def holds(program: Path) -> None:
    done = execute(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "all checks hold"
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr
