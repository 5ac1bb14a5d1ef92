"""Starts real front processes for tests (tests/api/serve_bytes.py) and talks to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ftengine.api.settings import ServeSettings
from ftengine.config import EngineConfig

SERVE = Path(__file__).with_name("serve_bytes.py")
MODEL = "bytes-model"


@dataclass
class FrontProcess:
    process: subprocess.Popen[bytes]
    folder: Path
    port: int
    started: float  # time.monotonic() just before the process was started

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=30, **options)

    def engine_events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.folder / "engine.log", kind)

    def open_gate(self) -> None:
        """The scripted engine goes on where it waits for that."""
        (self.folder / "gate").touch()

    def log(self) -> str:
        return (self.folder / "front.log").read_text()

    def end(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)


def settings(folder: Path, **changes: Any) -> ServeSettings:
    given = {"heartbeat_seconds": 5.0, "failure_seconds": 0.3, **changes}
    return ServeSettings(
        model_dir=str(folder),
        served_name=MODEL,
        port=given.pop("port", 0),
        engine=given.pop("engine_config", EngineConfig(model_dir=str(folder))),
        announce=str(folder / "announce.json"),
        **given,
    )


def spawn(folder: Path, **changes: Any) -> FrontProcess:
    """Started, not waited for."""
    folder.mkdir(exist_ok=True)
    text = msgspec.json.encode(settings(folder, **changes)).decode()
    started = time.monotonic()
    with (folder / "front.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(SERVE), text], stdout=log, stderr=log, env=dict(os.environ))
    return FrontProcess(process, folder, changes.get("port", 0), started)


def wait_listening(front: FrontProcess, seconds: float = 60) -> FrontProcess:
    announce = front.folder / "announce.json"
    until(lambda: announce.exists() or front.process.poll() is not None, seconds)
    assert front.process.poll() is None, front.log()
    front.port = json.loads(announce.read_text())["port"]
    return front


def wait_status(front: FrontProcess, status: str, seconds: float = 60) -> dict[str, Any]:
    """Polls /health; returns it."""
    health: dict[str, Any] = {}

    def reached() -> bool:
        health.update(httpx.get(f"{front.url}/health", trust_env=False, timeout=30).json())
        return health["status"] == status

    until(reached, seconds)
    return health


@contextlib.contextmanager
def front(folder: Path, engine: dict[str, Any] | None = None, **changes: Any) -> Iterator[FrontProcess]:
    """A front that is ready, or only listening when `engine` asks for a long load or a failure. SIGTERM at the end."""
    folder.mkdir(exist_ok=True)
    if engine is not None:
        (folder / "engine.json").write_text(json.dumps(engine))
    running = spawn(folder, **changes)
    try:
        wait_listening(running)
        if engine is None:
            wait_status(running, "ready")
        yield running
    finally:
        if running.process.poll() is None:
            running.end()


def events(log: Path, kind: str) -> list[dict[str, Any]]:
    """Of a log that may be written right now: its last line counts when it is whole."""
    whole, _, _ = log.read_text().rpartition("\n") if log.exists() else ("", "", "")
    return [event for line in whole.splitlines() if (event := json.loads(line))["event"] == kind]


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
