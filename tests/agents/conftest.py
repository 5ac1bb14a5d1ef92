from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.field import Field, make_field
from tests.support.cloud import FakeCloud
from tests.support.npm import InstalledAgents, installed_agents


@pytest.fixture(scope="session")
def agents() -> InstalledAgents:
    return installed_agents()


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as cloud:
        yield cloud


@pytest.fixture
def proxy() -> Iterator[FakeCloud]:
    """A proxy that lets nothing through, and remembers which hosts were asked for."""
    with FakeCloud() as proxy:
        yield proxy


@pytest.fixture
def field(tmp_path: Path, cloud: FakeCloud, proxy: FakeCloud, agents: InstalledAgents) -> Field:
    return make_field(tmp_path, cloud.url, proxy.url, agents)
