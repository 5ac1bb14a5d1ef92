from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftlaunch.cli import main
from ftlaunch.servers import running, stop
from tests.support.serving import SCRIPTED_CHECKPOINT, RunningServer, scripted_environment, serve

STEP_SECONDS, TOKEN_SECONDS = 0.01, 0.0005

Bench = Callable[..., dict[str, Any]]


def paced_environment(ft_home: Path) -> dict[str, str]:
    """Of a model that takes STEP_SECONDS for a step and TOKEN_SECONDS for a token of a prompt, with one thread."""
    return {
        **scripted_environment(ft_home),
        "FT_PLUGINS": "tests.bench.paced",
        "PACE_STEP": str(STEP_SECONDS),
        "PACE_TOKEN": str(TOKEN_SECONDS),
    }


@pytest.fixture(scope="session")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("bench")
    with serve(SCRIPTED_CHECKPOINT, home, "--threads", "1", environment=paced_environment(home)) as server:
        yield server


@pytest.fixture
def paced_home(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An FT_HOME whose servers are paced; every one that is left over is ended."""
    for name, value in paced_environment(ft_home).items():
        monkeypatch.setenv(name, value)
    yield ft_home
    for record in running():
        stop(record, patience=1.0)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs `ft bench ... --json` and returns the document."""

    def run(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        status = main(["bench", *arguments, "--json"])
        said = capsys.readouterr()
        assert status == 0, said.err
        return json.loads(said.out)

    return run
