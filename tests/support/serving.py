"""Real `ft serve` processes for tests, with their own FT_HOME."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED_CHECKPOINT = Path(__file__).with_name("scripted_checkpoint")
FT = (sys.executable, "-m", "ftlaunch")
START_TIMEOUT = 90.0  # seconds


@dataclass(frozen=True)
class RunningServer:
    url: str
    log: Path
    pid: int

    def stats(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/v1/stats", trust_env=False, timeout=60).json()

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def scripted_environment(ft_home: Path) -> dict[str, str]:
    """This process's environment, in which `ft` keeps its files in `ft_home` and knows the scripted model."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "FT_HOME": str(ft_home), "FT_PLUGINS": "tests.support.scripted", "PYTHONPATH": path}


@contextlib.contextmanager
def serve(
    model: str | Path,
    ft_home: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    seconds: float = START_TIMEOUT,
) -> Iterator[RunningServer]:
    """`ft serve --model MODEL FLAGS`, ready to answer within `seconds`; ended with SIGTERM, and it must end well."""
    port = free_port()
    ft_home.mkdir(parents=True, exist_ok=True)
    log = ft_home / f"serve-{port}.log"
    command = [*FT, "serve", "--model", str(model), "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment or scripted_environment(ft_home), stdout=out, stderr=subprocess.STDOUT, cwd=ft_home
        )
    server = RunningServer(f"http://127.0.0.1:{port}", log, process.pid)
    try:
        _wait_ready(server, process, seconds)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _wait_ready(server: RunningServer, process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"ft serve ended with {process.returncode}:\n{server.log_text()[-2000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", trust_env=False, timeout=20).json().get("status") == "ready":
                return
        time.sleep(0.1)
    raise RuntimeError(f"ft serve was not ready within {seconds:.0f} s:\n{server.log_text()[-2000:]}")
