"""Fixtures and helpers of the tests that pull from a Hub on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftlaunch.store.events import Event
from ftlaunch.store.fetch import fetch
from ftlaunch.store.hub.limits import Limits
from ftlaunch.store.names import hub_name
from ftlaunch.store.wishes import Pulled, Wishes
from tests.support.hub_server import Hub, hub

QUICK = Limits(timeout=20, attempts=4, first_wait=0.01, connections=4)
IMPATIENT = Limits(timeout=1, slowest=64e3, attempts=2, first_wait=0.01, connections=10)
NAME = "org/name"


@pytest.fixture
def a_hub(ft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Named by HF_ENDPOINT; nothing else of the user's Hub settings is left."""
    for variable in [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE_", "TRANSFORMERS_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def get(
    name: str = NAME, wishes: Wishes | None = None, limits: Limits = QUICK, seen: list[Event] | None = None
) -> Pulled:
    meant = hub_name(name)
    assert meant is not None
    events = [] if seen is None else seen
    return fetch(name, meant, wishes or Wishes(), events.append, limits)


def models(home: Path) -> list[str]:
    """What the store holds, hidden things too, without the locks."""
    folder = home / "models"
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".lock-")) if folder.is_dir() else []


def same(directory: Path, files: dict[str, bytes]) -> bool:
    here = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "ft-model.json"}
    return here == files


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def start_ft(home: Path, server: Hub, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    own = {"FT_HOME": str(home), "HF_HOME": str(home / "hf"), "HF_ENDPOINT": server.url, "FT_DEBUG": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "ftlaunch", *arguments],
        env={**os.environ, **own, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds
