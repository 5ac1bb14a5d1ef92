"""`ft bench trace record` against a real server on the CPU, and against one that answers as an engine on a GPU does."""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from ftengine.errors import FtError
from ftengine.experts.trace import encode_trace, near_misses
from ftengine.wire import MOST_TRACE_STEPS
from ftlaunch.cli import bench, main
from ftlaunch.servers import ServerRecord, running, start_background, stop, wait_ready
from ftlaunch.servers.ask import fetch
from tests.support.serving import SCRIPTED_CHECKPOINT, scripted_environment

STEPS, LAYERS, EXPERTS, TOP_K = 12, 2, 24, 4


def recorded() -> bytes:
    logits = np.random.default_rng(0).standard_normal((STEPS, LAYERS, EXPERTS))
    ids = np.argsort(-logits, -1)[:, :, :TOP_K]
    return encode_trace(ids, *near_misses(ids, logits), EXPERTS)


class Server(HTTPServer):
    answer: tuple[int, bytes] = 200, b""
    missing = 0
    asked: list[tuple[str, str | None, dict]]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, self.headers["authorization"], body))
        status, data = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + self.server.missing))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as there:
        there.asked = []
        record = ServerRecord("id", 1, "127.0.0.1", there.server_port, "demo", "demo", None, 0.0, "s3cret", None)
        monkeypatch.setattr("ftlaunch.servers.running", lambda: [record])
        thread = threading.Thread(target=there.serve_forever, args=[0.02])
        thread.start()
        yield there
        there.shutdown()
        thread.join()


def test_recorded_stored_and_replayed(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = 200, recorded()
    path = tmp_path / "mine.npz"
    command = ["bench", "trace", "record", "demo", "--steps", str(STEPS), "--out", str(path)]
    assert main([*command, "--json"]) == 0
    assert server.asked == [("/v1/trace", "Bearer s3cret", {"steps": STEPS})]
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(path), "steps": STEPS, "layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K}
    assert main(["bench", "trace", str(path)]) == 0
    assert capsys.readouterr().out.startswith("12 steps, 2 layers, 4 of 24 experts each; found in slots:")
    assert main(command) == 1
    assert "mine.npz is there already" in capsys.readouterr().err
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, b'{"error": {"message": "no experts here"}}'), "Error: no experts here\n"),
        ((503, b"not JSON"), "the server answered with status 503"),
        ((200, b"no zip"), "is not a routing trace"),
    ],
)
def test_what_is_no_recording_leaves_no_file(
    answer: tuple[int, bytes], said: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = answer
    assert main(["bench", "trace", "record", "--out", str(tmp_path / "mine.npz")]) == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


PATIENCE = 0.25
HEALTH = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
BEGUN = b"HTTP/1.1 200 OK\r\n"


class Stalls(socketserver.StreamRequestHandler):
    """Tells its health `healthy` times; of a recording, sends `begun` and then `drip` every 50 ms."""

    server: StallingServer

    def handle(self) -> None:
        first = self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        if first.startswith(b"GET"):
            self.server.healthy -= 1
            if self.server.healthy >= 0:
                self.wfile.write(HEALTH)
            return
        self.wfile.write(self.server.begun)
        with contextlib.suppress(OSError):
            while not self.server.over.wait(0.05):
                self.wfile.write(self.server.drip)


class StallingServer(socketserver.ThreadingTCPServer):
    healthy, begun, drip = 0, b"", b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Stalls)
        self.over = threading.Event()


@pytest.mark.parametrize(
    ("healthy", "begun", "drip"),
    [
        (0, b"", b""),
        (1, b"", b""),
        (9, BEGUN, b""),
        (9, BEGUN + b"Content-Length: 1000\r\n\r\n", b"x"),
        (9, BEGUN + b"\r\n", b"x"),
    ],
)
def test_a_server_that_stalls_is_left(healthy: int, begun: bytes, drip: bytes) -> None:
    with StallingServer() as there:
        there.healthy, there.begun, there.drip = healthy, begun, drip
        record = ServerRecord("id", 1, "127.0.0.1", there.server_address[1], "demo", "demo", None, 0.0, None, None)
        thread = threading.Thread(target=there.serve_forever, args=[0.02])
        thread.start()
        begin = time.monotonic()
        try:
            with pytest.raises(FtError, match="has stalled"):
                fetch(record, "/v1/trace", {"steps": 1}, "look", PATIENCE)
        finally:
            there.over.set()
            there.shutdown()
            thread.join()
        waits = 1 if begun else healthy + 1
        assert time.monotonic() - begin >= waits * PATIENCE
        assert begun or there.healthy < healthy


def test_an_answer_without_end_is_cut(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftlaunch.servers.ask.MOST_ANSWER", 1 << 20)
    server.answer = 200, bytes((1 << 20) + 1)
    assert main(["bench", "trace", "record", "--out", str(tmp_path / "mine.npz")]) == 1
    assert "the server's answer is longer than 1 MiB" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_answer_that_ends_early_is_none(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer, server.missing = (200, recorded()), 5
    assert main(["bench", "trace", "record", "--out", str(tmp_path / "mine.npz")]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_server_on_the_cpu_says_why(
    ft_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in scripted_environment(ft_home).items():
        monkeypatch.setenv(name, value)
    try:
        wait_ready(start_background(str(SCRIPTED_CHECKPOINT)))
        capsys.readouterr()
        assert main(["bench", "trace", "record", "--out", str(ft_home / "mine.npz")]) == 1
        assert "Error: the CPU engine has no cache of experts" in capsys.readouterr().err
    finally:
        for record in running():
            stop(record, patience=1.0)


def test_no_folder_and_no_server(tmp_path: Path, ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "trace", "record", "--out", str(tmp_path / "mine.npz")]) == 1
    assert "Error: no server runs\nTry:   ft serve --model demo" in capsys.readouterr().err
    assert bench.MOST_STEPS == MOST_TRACE_STEPS


def test_a_share_that_is_not_a_number_and_a_file_that_has_no_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(recorded())
    assert main(["bench", "trace", "replay", str(path), "--slots", "nan"]) == 2
    assert "nan is not a number" in capsys.readouterr().err
    pipe = tmp_path / "pipe.npz"
    os.mkfifo(pipe)
    assert main(["bench", "trace", "replay", str(pipe)]) == 1
    assert f"Error: {pipe} is not a file" in capsys.readouterr().err
