"""The command after "Try:" can be typed as it stands: it names the model that was asked for."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ftengine.errors import for_model
from tests.support.ports import free_port
from tests.support.serving import FT, SCRIPTED_CHECKPOINT, scripted_environment

STEPS = [
    ("ft serve --context 8192", "demo", "ft serve --model demo --context 8192"),
    ("ft serve", "demo", "ft serve --model demo"),
    (
        "ft serve --memory-ratio 0.8, or ft serve --max-prefill-length 512",
        "a b",
        "ft serve --model 'a b' --memory-ratio 0.8, or ft serve --model 'a b' --max-prefill-length 512",
    ),
    ("FT_DEBUG=1 ft serve", "demo", "FT_DEBUG=1 ft serve --model demo"),
    ("ft serve --model other --device cpu", "demo", "ft serve --model other --device cpu"),
    ("ft list", "demo", "ft list"),
    ("", "demo", ""),
]


@pytest.mark.parametrize(("step", "model", "expected"), STEPS)
def test_the_model_is_named_once(step: str, model: str, expected: str) -> None:
    assert for_model(step, model) == expected
    assert for_model(expected, "another") == expected


REFUSED = {
    "by the front": ("--host", "0.0.0.0"),
    "by the engine": ("--context", "100000000", "--device", "cpu"),
    "by a check of both": ("--moe-backend", "resident", "--moe-cache-size", "3"),
}


@pytest.mark.parametrize("flags", REFUSED.values(), ids=REFUSED.keys())
def test_what_ft_serve_advises(flags: tuple[str, ...], tmp_path: Path) -> None:
    model = tmp_path / "my model"
    model.symlink_to(SCRIPTED_CHECKPOINT)
    command = [*FT, "serve", "--model", str(model), "--port", str(free_port()), *flags]
    ended = subprocess.run(
        command, env=scripted_environment(tmp_path / "home"), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    advice = re.search(r"^Try: +(.*)$", ended.stderr, re.MULTILINE)
    assert advice is not None, ended.stderr
    assert shlex.split(advice[1])[:4] == ["ft", "serve", "--model", str(model)]
