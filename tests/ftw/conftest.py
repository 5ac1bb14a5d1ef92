from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ftengine.weights.convert.convert import convert
from ftengine.weights.convert.plan import Options
from ftengine.weights.ftw.layout import Origin
from tests.weights import checkpoints
from tests.weights.conventions import CONVENTIONS


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose experts are NVFP4 and whose other matrices are BF16. Read only."""
    folder = tmp_path_factory.mktemp("ftw") / "model"
    checkpoints.write(folder, CONVENTIONS["modelopt-nvfp4"])
    return folder


@pytest.fixture(scope="session")
def converted(model: Path) -> Path:
    """`model` as an FTW directory of several files. Read only."""
    out = model.parent / "converted"
    convert(model, out, Options(shard_gib=1e-4), Origin("tiny", "0123abcd", "safetensors"))
    return out


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of `converted` that a test may damage."""

    def make(name: str = "copy") -> Path:
        return Path(shutil.copytree(converted, tmp_path / name))

    return make
