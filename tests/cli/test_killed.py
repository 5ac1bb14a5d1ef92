"""Real `ft serve` processes and their engines, killed while they start and while they stream: nothing stays behind.

    python -m pytest -m slow -s tests/cli/test_killed.py    # 20 rounds

Modes of the folders that they made are looked at here, too. On a GPU: tests/gpu/test_server_faults.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.api.sse_reader import Frame, frames
from tests.support.ports import free_port
from tests.support.serving import FT, SCRIPTED_CHECKPOINT, RunningServer, scripted_environment, serve

SECONDS = 30.0  # within which everything is gone: one or two, on a machine that has nothing else to do
ROUNDS = int(os.environ.get("FT_TEST_ROUNDS", "20"))
FLAGS = ("--context", "4096", "--threads", "1", "--device", "cpu")
BODY = {
    "messages": [{"role": "user", "content": "tell me"}],
    "max_tokens": 4000,
    "ignore_eos": True,
    "stream": True,
}


def processes(home: Path) -> list[psutil.Process]:
    """All that run with this FT_HOME, whoever started them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FT_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_gone(home: Path) -> float:
    begun = time.monotonic()
    while left := processes(home):
        assert time.monotonic() - begun < SECONDS, [process.cmdline()[:4] for process in left]
        time.sleep(0.02)
    return time.monotonic() - begun


@contextlib.contextmanager
def started(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Not waited for."""
    command = [*FT, "serve", "--model", str(SCRIPTED_CHECKPOINT), "--port", str(free_port()), *FLAGS]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=scripted_environment(home), **quiet)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def interrupted(server: RunningServer, pid: int, number: int) -> list[Frame]:
    """A long answer's frames; `pid` gets the signal when the third has come."""
    received: list[Frame] = []
    with (
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=BODY) as response,
        contextlib.suppress(httpx.TransportError),  # the server itself may be gone
    ):
        for frame in frames(response.iter_bytes()):
            received += [frame] if isinstance(frame, Frame) else []
            if len(received) == 3:
                os.kill(pid, number)
    assert len(received) >= 3
    return received


@pytest.mark.parametrize(
    "moment", [pytest.param(0.3, marks=pytest.mark.slow), 1.0, pytest.param(1.6, marks=pytest.mark.slow)]
)
def test_killed_while_it_starts(moment: float, tmp_path: Path) -> None:
    """Before the engine is there, while it imports torch, while it loads."""
    home = tmp_path / "home"
    with started(home) as process:
        time.sleep(moment)
        assert process.poll() is None
        process.kill()
        process.wait()
        wait_gone(home)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@contextlib.contextmanager
def serving(tmp_path: Path, home: Path) -> Iterator[RunningServer]:
    """Its log lies beside its FT_HOME, which is the server's to make."""
    with serve(SCRIPTED_CHECKPOINT, tmp_path / "logs", *FLAGS, environment=scripted_environment(home)) as server:
        yield server


@pytest.mark.usefixtures("open_umask")
def test_killed_while_streaming_and_what_it_made_is_the_users_own(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    with serving(tmp_path, home) as server:
        interrupted(server, server.pid, signal.SIGKILL)
        wait_gone(home)
    made = [home.parent, *(path for path in home.parent.rglob("*") if path.is_dir())]
    assert {path.name for path in made} >= {"new", "home", "run", "servers", "cache", "prompts"}
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in made} == dict.fromkeys(made, 0o700)


@pytest.mark.slow
def test_killed_and_ended_again_and_again(tmp_path: Path) -> None:
    """Row 12: the engine is killed in the middle of an answer, after which the server answers as before; then the
    server is ended in the middle of one, by SIGTERM and kill -9 in turn. All start from one FT_HOME."""
    home, took, expected = tmp_path / "home", [], None
    for number in range(ROUNDS):
        with (
            serving(tmp_path, home) as server,
            httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        ):
            whole = {**BODY, "max_tokens": 40, "stream": False}
            said = client.post("/v1/chat/completions", json=whole).json()["choices"][0]["message"]
            expected = expected or said
            engine = client.get("/health").json()["engine_pid"]
            assert interrupted(server, engine, signal.SIGKILL)[-1].data["error"]["message"]
            assert client.post("/v1/chat/completions", json=whole).json()["choices"][0]["message"] == expected == said
            assert client.get("/health").json()["restarts"] == 1
            assert not psutil.pid_exists(engine)
            assert len(processes(home)) == 2
            interrupted(server, server.pid, signal.SIGKILL if number % 2 else signal.SIGTERM)
            took.append(wait_gone(home))
    print(f"\n{ROUNDS} engines killed, {ROUNDS} servers ended while streaming; gone after at most {max(took):.1f} s")
