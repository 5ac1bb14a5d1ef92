"""Slow and stalled connections do not hurt others (faults.md row 16)."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ftengine.api.settings import Limits
from tests.api.fronts import FrontProcess, front, until
from tests.api.talk import post, script, simple
from tests.support.timing import quickest, seconds

CHAT = "/v1/chat/completions"
DEFAULT = Limits().header_seconds  # ten times what is set here
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    limits = Limits(header_seconds=1.5, body_seconds=1.5)
    folder: Path = tmp_path_factory.mktemp("hasty") / "model"
    with front(folder, limits=limits, stall_seconds=1.0) as running:
        yield running


def connect(front: FrontProcess, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", front.port), timeout=60)
    connection.sendall(sent)
    return connection


def closed_after(connection: socket.socket) -> float:
    """Seconds until the server closes it, whatever it says before."""
    connection.settimeout(60)
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return time.monotonic() - begun


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/chat", (HEAD + "Content-Length: 100\r\n\r\n{").encode(), (HEAD + "X-A: b\r\n").encode()],
    ids=["nothing", "request line", "body", "headers"],
)
def test_half_a_request_is_dropped(hasty: FrontProcess, sent: bytes) -> None:
    with connect(hasty, sent) as connection:
        assert closed_after(connection) < DEFAULT


def test_a_trickle_does_not_buy_time(hasty: FrontProcess) -> None:
    begun = time.monotonic()
    with connect(hasty, HEAD.encode()) as connection, contextlib.suppress(ConnectionError):
        while time.monotonic() - begun < DEFAULT:
            connection.sendall(b"X-A: b\r\n")
            time.sleep(0.1)
    assert time.monotonic() - begun < DEFAULT


def test_five_hundred_half_open_connections(hasty: FrontProcess) -> None:
    half_open = [connect(hasty, HEAD.encode()) for _ in range(500)]
    try:
        with hasty.client() as client:
            body = simple(CHAT, script(say="quick"))
            assert quickest(lambda: seconds(lambda: post(client, CHAT, body)), 0.5) < 0.5
        until(lambda: len(psutil.Process(hasty.process.pid).net_connections("tcp")) < 50)
    finally:
        for connection in half_open:
            connection.close()


def test_headers_of_a_megabyte(hasty: FrontProcess) -> None:
    with connect(hasty) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(HEAD.encode() + b"X-A: " + b"a" * (1 << 20) + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert connection.recv(100).startswith(b"HTTP/1.1 431")
    with connect(hasty, HEAD.encode() + b"X-A: " + b"a" * (80 << 10)) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 431")


def test_a_body_in_the_headers_packet_is_no_header(hasty: FrontProcess) -> None:
    body = json.dumps(simple(CHAT, "x" * 70_000)).encode()
    with connect(hasty, HEAD.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400")  # too long for the model, not for HTTP


def test_a_client_that_takes_nothing_is_left(hasty: FrontProcess) -> None:
    """With room for few bytes in the sockets, the stream of a client that reads nothing stalls and is cancelled. Of
    each token much is told: also where many go out in one event it is more than a system keeps for a socket."""
    cancelled = len(hasty.engine_events("cancel"))
    text = script(say="z" * 100, repeat=35, size=20, end_gate=True)
    body = json.dumps(simple(CHAT, text, stream=True, n=8, logprobs=True, top_logprobs=2)).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", hasty.port))
    with connection:
        connection.sendall(HEAD.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with hasty.client() as client:
            until(lambda: len(hasty.engine_events("cancel")) > cancelled, 120)
            until(lambda: "took no byte for 1 s" in hasty.log())  # a cancel of the test before may have been late
            post(client, CHAT, simple(CHAT, script(say="others")))
            until(lambda: client.get("/v1/stats").json()["running"] == 0)
