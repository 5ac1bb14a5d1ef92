"""Ten thousand damaged inputs a parser by default; a million each with `pytest -m slow tests/fuzz`.

No input may raise anything but the one sentence, take a second, or leave 64 MB behind.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.fuzz.driver import MEGABYTES, MEMORY, fuzz, read_corpus
from tests.fuzz.targets import TARGETS

DEFAULT, MANY = 10_000, 1_000_000


def withstands(name: str, executions: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        execute, seeds = TARGETS[name](Path(folder))
        outcome = fuzz(execute, [*seeds, *read_corpus(name)], executions, seed)
    assert not outcome.findings, outcome.findings[0]
    assert outcome.growth < MEGABYTES, f"{outcome.growth:.0f} MB more than before"
    assert outcome.peak < MEGABYTES, f"{outcome.peak:.0f} MB at once"
    assert outcome.taken < outcome.executions, "nothing was refused"


@pytest.mark.parametrize("name", TARGETS)
def test_ten_thousand_damaged_inputs(name: str) -> None:
    withstands(name, DEFAULT, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
def test_a_million_damaged_inputs(name: str) -> None:
    withstands(name, MANY, seed=2)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_sound(name: str, tmp_path: Path) -> None:
    """Each is taken: damage to what was refused anyway would test nothing."""
    execute, seeds = TARGETS[name](tmp_path)
    for number, content in enumerate(seeds):
        if name == "gguf" and number == len(seeds) - 1:
            continue  # an architecture that is not known has no layout
        execute(content)
