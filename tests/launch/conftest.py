from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.place import Place, make_place
from tests.support.serving import SCRIPTED_CHECKPOINT, RunningServer, serve


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that no launch here starts or stops."""
    with serve(SCRIPTED_CHECKPOINT, tmp_path_factory.mktemp("server")) as server:
        yield server
