from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.api.fronts import FrontProcess, front


@pytest.fixture(scope="session")
def shared_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """One front for the tests that leave it as they found it. No heartbeat, at which it might notice something."""
    with front(tmp_path_factory.mktemp("front") / "model", heartbeat_seconds=300.0) as running:
        yield running


@pytest.fixture
def client(shared_front: FrontProcess) -> Iterator[httpx.Client]:
    with shared_front.client() as opened:
        yield opened
