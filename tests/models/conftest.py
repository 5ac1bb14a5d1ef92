from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import tiny


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of that kind, written once a session and not to be changed."""
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / kind
            made[kind] = tiny.write_with_vision(folder) if kind == "qwen3.5-vision" else tiny.write(kind, folder)
        return made[kind]

    return find


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # matrices this small only wait for one another
