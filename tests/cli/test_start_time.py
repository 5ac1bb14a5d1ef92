"""Commands that compute nothing start fast, because they import nothing heavy.

The bar is 200 ms on a quiet machine. Processor time is measured, which other programs on the machine do not lengthen
as much as they do wall time, and the best of five runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.timing import quickest

COMMANDS = [
    ["--help"],
    ["version"],
    ["list"],
    ["show", "--help"],
    ["verify"],
    ["rm", "--help"],
    ["cache"],
    ["ps"],
    ["stop"],
    ["pull", "--help"],
    ["serve", "--help"],
    ["launch", "--help"],
    ["doctor", "--help"],
]
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "rich",
    "starlette",
    "uvicorn",
    "huggingface_hub",
    "tokenizers",
    "gguf",
    "jinja2",
}
BAR_SECONDS = 0.2

REPORT_MODULES = """
import json, sys
from ftlaunch.cli import main
status = main(sys.argv[1:])
print("\\n" + json.dumps(sorted(name for name in sys.modules if "." not in name)))
sys.exit(status)
"""


@pytest.fixture(params=COMMANDS, ids=" ".join)
def command(request: pytest.FixtureRequest, ft_home: Path) -> list[str]:
    return list(request.param)


def test_nothing_heavy_is_imported(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", REPORT_MODULES, *command], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "click" in modules
    assert not modules & HEAVY


def test_processor_time(command: list[str]) -> None:
    assert quickest(lambda: processor_seconds(command), BAR_SECONDS) < BAR_SECONDS


def processor_seconds(command: list[str]) -> float:
    process = subprocess.Popen(
        [sys.executable, "-m", "ftlaunch", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime
