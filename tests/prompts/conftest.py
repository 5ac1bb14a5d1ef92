from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ftengine.dialect import open_dialect
from ftengine.models import base
from ftengine.weights.checkpoint import Checkpoint
from tests.models.tiny import change_config
from tests.prompts import loaded, small_models
from tests.prompts.forced import ForcedModel
from tests.prompts.loaded import Load
from tests.prompts.replay import Script
from tests.support.exchanges import TRACES

DTYPE = "bfloat16"


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Script]]:
    """Kind of model -> its checkpoint's folder, and what puts tokens into its mouth.

    The architecture has a name of its own, under which the real one's loader is registered; weights are loaded once.
    """
    for needed in (TRACES, small_models.TOKENIZER):
        if not needed.is_dir():
            pytest.skip(f"no recordings: {needed} is not there")

    @cache
    def make(kind: str) -> tuple[Path, Script]:
        folder = small_models.write_speaking(kind, tmp_path_factory.mktemp(kind) / "model")
        checkpoint = Checkpoint.open(folder)
        model = base.load(checkpoint, base.ModelOptions(DTYPE, threads=1))
        script = Script(open_dialect(checkpoint), model.cache_layout)

        def load(_: Checkpoint, options: base.ModelOptions) -> base.Model:
            assert options.dtype == DTYPE
            script.model = ForcedModel(model, script.answer)
            return script.model

        forced = f"Forced{checkpoint.architecture}"
        base.register(forced, load)
        change_config(folder, architectures=[forced])
        return folder, script

    return make


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Each model is written and loaded once."""
    folder = cache(lambda kind: loaded.write(kind, tmp_path_factory.mktemp(kind) / "model"))
    return cache(lambda kind, dtype: loaded.open_loaded(folder(kind), dtype))


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A folder in memory where there is one: what is tested is not how long a disk takes to sync."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
