"""A client that leaves frees its slot: the engine is told at once, streaming or not, and the next request works."""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests.api.fronts import FrontProcess, until
from tests.api.talk import PATHS, post, script, simple


def open_request(front: FrontProcess, path: str, body: dict) -> socket.socket:
    """A raw connection on which the request was sent, so that it can be dropped at any point."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", front.port), timeout=10)
    connection.sendall(head.encode() + b"\r\n" + raw)
    return connection


def count(front: FrontProcess, kind: str) -> int:
    return len(front.engine_events(kind))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_leaving_cancels(shared_front: FrontProcess, path: str, streaming: bool, when: str) -> None:
    text = script(hold=30) if when == "prefill" else script(say="x" * 3000, delay=0.01, size=1)
    submitted, cancelled = count(shared_front, "submit"), count(shared_front, "cancel")
    connection = open_request(shared_front, path, simple(path, text, stream=streaming))
    until(lambda: count(shared_front, "submit") == submitted + 1)
    if when == "decode":
        time.sleep(0.1)
    connection.close()
    left = time.monotonic()
    until(lambda: count(shared_front, "cancel") == cancelled + 1)
    assert time.monotonic() - left < 0.5
    with shared_front.client() as client:
        post(client, path, simple(path, script(say="next")))
        assert client.get("/v1/stats").json()["running"] == 0


def test_a_stop_string_cancels_too(shared_front: FrontProcess) -> None:
    cancelled = count(shared_front, "cancel")
    with shared_front.client() as client:
        body = simple("/v1/chat/completions", script(say="abSTOP" + "c" * 3000, delay=0.01), stop="STOP")
        assert post(client, "/v1/chat/completions", body)["choices"][0]["message"]["content"] == "ab"
    until(lambda: count(shared_front, "cancel") == cancelled + 1)


@pytest.mark.parametrize("count_of_clients", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_leave_and_nothing_is_left(shared_front: FrontProcess, count_of_clients: int) -> None:
    path = "/v1/chat/completions"
    for number in range(count_of_clients):
        body = simple(path, script(say="y" * 500, delay=0.01), stream=number % 2 == 0)
        connection = open_request(shared_front, path, body)
        time.sleep(0.001 * (number % 30))
        connection.close()
    with shared_front.client() as client:
        until(lambda: client.get("/v1/stats").json()["running"] == 0)
        post(client, path, simple(path, script(say="next")))
        until(lambda: client.get("/v1/stats").json()["engine"]["running"] == 0)
