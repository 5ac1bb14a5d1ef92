"""Start, /health, signals, ports and leases of the real front process."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from ftengine import leases
from ftengine.api.listen import bind
from ftengine.errors import ConfigError
from tests.api.fronts import front, settings, spawn, until, wait_listening
from tests.api.sse_reader import Frame, frames
from tests.api.talk import PATHS, script, simple
from tests.support.ports import free_port
from tests.support.timing import quickest, seconds


def test_health_answers_within_half_a_second(tmp_path: Path) -> None:
    """From the start of the interpreter. The fastest of some; on a busy machine the processor's time stands for it."""
    folders = (tmp_path / f"model{attempt}" for attempt in itertools.count())
    assert quickest(lambda: seconds_to_health(next(folders)), 0.5) < 0.5


def seconds_to_health(folder: Path) -> float:
    """Of the clock, or of the processor and a little more, whichever is less."""
    folder.mkdir()
    (folder / "engine.json").write_text('{"load": 300}')
    running = spawn(folder, port=free_port())
    health = None
    while health is None and time.monotonic() - running.started < 60:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
            connection.request("GET", "/health")
            health = json.loads(connection.getresponse().read())
            connection.close()
        time.sleep(0.01)
    took = time.monotonic() - running.started
    used = psutil.Process(running.process.pid).cpu_times()
    running.end()
    assert health is not None
    assert health["status"] == "loading"
    assert 0 <= health["progress"] < 1
    return min(took, used.user + used.system + 0.1)


def test_the_front_imports_nothing_heavy_before_it_listens() -> None:
    code = (
        "import sys, ftengine.api.server, ftengine.api.app, ftengine.leases\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'jinja2', 'psutil'} & set(sys.modules)\n"
        "sys.exit(' '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_both_processes_and_every_stream(tmp_path: Path, number: int) -> None:
    folders = (tmp_path / f"model{attempt}" for attempt in itertools.count())
    assert quickest(lambda: end_amid_streams(next(folders), number), 2) < 2


def end_amid_streams(folder: Path, number: int) -> float:
    """Seconds from the signal to the end."""
    with front(folder) as running, contextlib.ExitStack() as stack:
        engine = httpx.get(f"{running.url}/health", trust_env=False).json()["engine_pid"]
        streams = []
        for path in PATHS:
            client = stack.enter_context(running.client())
            body = simple(path, script(say="z" * 3000, delay=0.02), stream=True)
            streams.append(stack.enter_context(client.stream("POST", path, json=body)))
        until(lambda: len(running.engine_events("submit")) == len(PATHS))
        begun = time.monotonic()
        assert running.end(number) == 0
        took = time.monotonic() - begun
        assert not psutil.pid_exists(engine)
        for path, response in zip(PATHS, streams, strict=True):
            last = [frame for frame in frames(response.iter_bytes()) if isinstance(frame, Frame)][-1]
            assert "stopping" in str(last.data), path
    assert "Traceback" not in running.log()
    return took


def test_killed_front_leaves_no_engine(tmp_path: Path) -> None:
    with front(tmp_path / "model") as running:
        engine = httpx.get(f"{running.url}/health", trust_env=False).json()["engine_pid"]
        running.process.kill()
        running.process.wait()
        until(lambda: not psutil.pid_exists(engine))


def test_signal_while_the_engine_loads(tmp_path: Path) -> None:
    folders = (tmp_path / f"model{attempt}" for attempt in itertools.count())

    def end() -> float:
        with front(next(folders), engine={"load": 300}) as running:
            return seconds(lambda: running.end() == 0 or pytest.fail("it did not end well"))

    assert quickest(end, 2) < 2


def test_a_second_server_says_who_holds_the_port(tmp_path: Path) -> None:
    with front(tmp_path / "one") as first:
        second = spawn(tmp_path / "two", port=first.port)
        assert second.process.wait(60) == 3
        assert f"port {first.port} on 127.0.0.1 is in use by" in second.log()
        assert f"(pid {first.process.pid})" in second.log()


def test_in_the_background_another_port_is_taken_instead(tmp_path: Path) -> None:
    """Also one that was free a moment ago; who asks for none, and who may not, is not affected."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        held = other.getsockname()[1]
        with bind(settings(tmp_path, port=held, other_port=True)) as listener:
            assert listener.getsockname()[1] not in (0, held)
            assert socket.create_connection(listener.getsockname()[:2], timeout=60).close() is None
        with pytest.raises(ConfigError, match=f"port {held} on 127.0.0.1 is in use"):
            bind(settings(tmp_path, port=held))
    port = free_port()
    with bind(settings(tmp_path, port=port, other_port=True)) as listener:
        assert listener.getsockname()[1] == port


def test_control_endpoints(tmp_path: Path) -> None:
    with front(tmp_path / "model", max_output_tokens=100) as running, running.client() as client:
        health = client.get("/health").json()
        assert (health["version"], health["status"], health["progress"]) == (1, "ready", 1.0)
        assert (health["context_length"], health["max_output_tokens"]) == (4096, 100)
        assert health["pid"] == running.process.pid
        listed = client.get("/v1/models").json()
        assert (listed["object"], listed["has_more"]) == ("list", False)
        entry = listed["data"][0]
        assert entry == client.get("/v1/models/bytes-model").json()
        assert (entry["id"], entry["object"], entry["type"]) == ("bytes-model", "model", "model")
        assert (entry["context_length"], entry["max_output_tokens"]) == (4096, 100)
        for path in ("/", "/api/hello", "/health"):
            assert client.head(path).status_code == 200
            assert client.get(path).status_code == 200
        body = simple("/v1/messages", script(say="z", repeat=300))
        assert client.post("/v1/messages", json=body).json()["usage"]["output_tokens"] == 100
        stats = client.get("/v1/stats").json()
        assert stats["version"] == 1
        assert stats["answers"] == {"messages": 1}
        assert stats["outcomes"] == {"length": 1}
        assert stats["tokens"]["output"] == 100
        assert stats["engine"] == {"running": 0}
        assert stats["facts"]["threads"]["reason"] == "scripted"
    log = running.log()
    assert "messages 127.0.0.1: prompt" in log
    assert "output 100" in log
    assert "zzz" not in log


def test_ends_after_its_last_lease(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    first = leases.acquire(folder)  # before the server looks for one
    with front(tmp_path / "model", lease_dir=str(folder)) as running:
        with first:
            with leases.acquire(folder):
                time.sleep(1.2)
            time.sleep(1.2)
            assert running.process.poll() is None
        assert running.process.wait(60) == 0
        assert "no lease is held any more" in running.log()


def test_ends_when_nobody_comes(tmp_path: Path) -> None:
    running = spawn(tmp_path / "model", lease_dir=str(tmp_path / "leases"), lease_grace=0.5)
    assert running.process.wait(60) == 0
    assert "no lease is held any more" in running.log()


def test_a_crashed_holders_lease_ends(tmp_path: Path) -> None:
    code = f"import time; from ftengine import leases; lease = leases.acquire({str(tmp_path)!r}); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: leases.held(tmp_path) == 1)
    finally:
        holder.kill()
        holder.wait()
    assert leases.held(tmp_path) == 0
    assert list(tmp_path.iterdir()) == [], "its file is removed"


def test_leases_are_private_counted_and_not_inherited(tmp_path: Path) -> None:
    folder = tmp_path / "server" / "leases"
    assert leases.held(folder) == 0
    with leases.acquire(folder) as one, leases.acquire(folder) as two:
        assert leases.held(folder) == 2
        assert one.path.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
        one.release()
        one.release()
        assert leases.held(folder) == 1
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        two.release()
        assert leases.held(folder) == 0


def test_a_symlink_among_the_leases_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("x")
    folder = tmp_path / "leases"
    folder.mkdir()
    (folder / "1-a").symlink_to(target)
    assert leases.held(folder) == 0
    assert target.read_text() == "x"


def test_settings_are_checked(tmp_path: Path) -> None:
    running = spawn(tmp_path / "model", port=70000)
    assert running.process.wait(60) == 3
    assert "ConfigError" in running.log()
    assert settings(tmp_path).engine.model_dir == str(tmp_path)
    wait = spawn(tmp_path / "other", host="::1", port=0)
    wait_listening(wait)
    assert httpx.get(f"http://[::1]:{wait.port}/health", trust_env=False).status_code == 200
    wait.end()
