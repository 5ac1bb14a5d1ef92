"""A server that lives is found and can be stopped whatever becomes of its record: it writes it again, and where it does
not, what it announced and its own /health tell of it. With real processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ftengine.errors import FtError
from ftengine.locks import try_lock
from ftlaunch import paths
from ftlaunch.cli import main
from ftlaunch.machine import server as doctor
from ftlaunch.machine.probe import Asked
from ftlaunch.servers import ServerRecord, lost, running, start_background, stop
from ftlaunch.servers.ask import ask
from ftlaunch.servers.registry import port_path, record_path
from tests.support.ports import free_port
from tests.support.serving import SCRIPTED_CHECKPOINT, scripted_environment, serve

NEVER_LOOKS = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from ftlaunch.servers import ServerRecord, publish
from ftlaunch.servers.registry import port_path

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"status": "ready", "model": "found", "pid": os.getpid(), "engine_pid": 1}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

server = HTTPServer(("127.0.0.1", 0), Health)
port = server.server_address[1]
record = ServerRecord("x", os.getpid(), "127.0.0.1", port, "m", "m", None, time.time(), None, None)
with publish(record):
    port_path("x").write_text(json.dumps({"pid": os.getpid(), "host": "127.0.0.1", "port": port}))
    print(port, flush=True)
    server.serve_forever()
"""


@pytest.fixture
def home(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, value in scripted_environment(ft_home).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ftlaunch.servers.start.DEFAULT_PORT", free_port())
    # A machine that stands still for a moment: the package has a function of the module's name.
    monkeypatch.setattr(sys.modules["ftlaunch.servers.lost"], "HEALTH_SECONDS", 60.0)
    yield ft_home
    monkeypatch.setenv("FT_HOME", str(ft_home))
    for record in running() + lost():
        stop(record, patience=1.0)


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def replaced(path: Path, content: bytes) -> None:
    """By another file: nobody holds a lock on it."""
    draft = path.with_name("draft")
    draft.write_bytes(content)
    draft.rename(path)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_text("")


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(b""),
    "written over": lambda path: path.write_bytes(b"\xff" * 100),
    "replaced by nothing": lambda path: replaced(path, b""),
    "replaced by bytes": lambda path: replaced(path, b"\x00\xff" * 100),
    "a folder": to_folder,
    "a pipe": to_fifo,
    "removed": lambda path: path.unlink(),
    "its folder removed": lambda path: shutil.rmtree(path.parent),
}


def test_a_server_writes_its_record_again(home: Path) -> None:
    record = start_background(str(SCRIPTED_CHECKPOINT), leased=False)
    for name in ("truncated", "replaced by nothing", "a folder", "a pipe", "its folder removed"):
        if name not in ("a folder", "its folder removed"):
            DAMAGES[name](port_path(record.id))
        DAMAGES[name](record_path(record.id))
        until(lambda: running() == [record], f"{name}: it is not found again")
    assert record_path(record.id).stat().st_mode & 0o777 == 0o600
    assert stop(record, patience=30.0)
    assert running() == []
    assert not record_path(record.id).exists()
    assert not port_path(record.id).exists()


@pytest.fixture
def deaf(home: Path) -> Iterator[ServerRecord]:
    """Of a server that never looks after its record."""
    program = home.parent / "ft"  # as which it is known
    program.write_text(NEVER_LOOKS)
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield running()[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", [name for name in DAMAGES if name != "its folder removed"])
def test_a_server_without_a_record_is_shown_and_stopped(
    deaf: ServerRecord, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[name](record_path(deaf.id))
    for _ in range(2):  # a look takes nothing away that the next one needs
        assert running() == []
        assert main(["ps"]) == 0
        headings, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
        shown = dict(zip(headings, row, strict=True))
        assert (shown["MODEL"], shown["URL"], shown["PID"]) == ("found", deaf.url, str(deaf.pid))
    found = next(each for each in doctor.probe(Asked(quick=True)) if each.id == "server.running")
    assert found.value == f"1 server: found on {deaf.port}"
    assert main(["stop", str(deaf.port)]) == 0
    assert f"Stopped found at {deaf.url} (pid {deaf.pid})" in capsys.readouterr().out
    assert lost() == []


def test_what_a_dead_server_left_is_removed(deaf: ServerRecord) -> None:
    os.kill(deaf.pid, signal.SIGKILL)
    until(lambda: psutil.Process(deaf.pid).status() == psutil.STATUS_ZOMBIE, "it lives")
    replaced(record_path(deaf.id), b"")
    assert running() == lost() == []
    assert list(paths.servers().iterdir()) == []


def test_a_port_names_a_server_of_which_nothing_is_kept_here(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = start_background(str(SCRIPTED_CHECKPOINT), leased=False)
    monkeypatch.setenv("FT_HOME", str(tmp_path / "another"))
    finding = doctor.port(record.port, set())
    assert f"ft's server of {record.served_name} (pid {record.pid})" in finding.value
    assert f"ft stop {record.port}" in finding.mend
    assert main(["stop", str(record.port)]) == 0
    assert f"Stopped {record.served_name}" in capsys.readouterr().out
    assert main(["stop", str(record.port)]) == 1


def test_where_no_record_can_be_written_the_model_is_served(home: Path) -> None:
    """As on a full disk. The server says so, and is found as soon as there is room."""
    home.mkdir()
    (home / "run").write_text("in the way")
    with serve(SCRIPTED_CHECKPOINT, home) as server:
        assert "ft ps does not show this server" in server.log_text()
        assert f"{home}/run" in server.log_text()
        (home / "run").unlink()
        until(running, "it is not found")
        assert running()[0].pid == server.pid


def test_nobody_else_is_stopped_for_a_record(home: Path) -> None:
    """Whatever process a damaged record, or one of another container, names: not even process group 0, or init."""
    stranger = subprocess.Popen(["sleep", "120"])
    try:
        for pid in (0, 1, stranger.pid):
            record = ServerRecord("gone", pid, "127.0.0.1", free_port(), "m", "m", None, time.time(), None, None)
            path = record_path("gone")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            with path.open("rb") as file:
                assert try_lock(file.fileno())  # by this test, so it counts as alive
                with pytest.raises(FtError, match=f"process {pid} is not the server of m"):
                    stop(record, patience=0.1)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_record_that_names_another_process_than_was_announced(home: Path) -> None:
    record = start_background(str(SCRIPTED_CHECKPOINT), leased=False)
    content = record_path(record.id).read_bytes()
    record_path(record.id).write_bytes(content.replace(b'"pid":%d' % record.pid, b'"pid":1'))
    assert all(found.pid == record.pid for found in running() + lost())
    until(lambda: [found.pid for found in running()] == [record.pid], "the record is written again")


@pytest.mark.parametrize("content", ['{"port": 1, "host": "", "pid": Infinity}', '{"port": 1e999, "pid": 1}'])
def test_an_announcement_of_no_number_is_forgotten(content: str, home: Path) -> None:
    path = port_path("left")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    assert running() == lost() == []
    assert not path.exists()


def test_a_leftover_that_names_another_program_is_forgotten(home: Path) -> None:
    """A process id comes again, in a container soon, and somebody may listen on that very port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = {"port": listening.getsockname()[1], "host": "127.0.0.1", "pid": os.getpid()}
        path = port_path("left")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(where))
        assert running() == lost() == []
        assert not path.exists()


def test_a_host_that_none_can_have_does_not_answer() -> None:
    assert ask(ServerRecord("x", 1, "[x", 1, "m", "m", None, 0.0, None, None), "/health") is None
