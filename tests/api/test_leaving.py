"""A client that leaves frees its slot: the engine is told at once, streaming or not, and the next request works."""

from __future__ import annotations

import json
import secrets
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


def reached(front: FrontProcess, tag: str) -> bool:
    """Whether the engine was given the request whose script has this tag."""
    return any(event["tag"] == tag for event in front.engine_events("submit"))


def cancelled(front: FrontProcess, tag: str) -> bool:
    (number,) = (event["id"] for event in front.engine_events("submit") if event["tag"] == tag)
    return any(event["id"] == number for event in front.engine_events("cancel"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_leaving_cancels(shared_front: FrontProcess, path: str, streaming: bool, when: str) -> None:
    """Minutes before the answer or a heartbeat would be sent."""
    tag = secrets.token_hex(8)
    text = script(tag=tag, hold=120) if when == "prefill" else script(tag=tag, say="x" * 3000, delay=0.04, size=1)
    connection = open_request(shared_front, path, simple(path, text, stream=streaming))
    until(lambda: reached(shared_front, tag))
    if when == "decode":
        time.sleep(0.1)
    connection.close()
    until(lambda: cancelled(shared_front, tag))
    with shared_front.client() as client:
        post(client, path, simple(path, script(say="next")))
        until(lambda: client.get("/v1/stats").json()["running"] == 0)


def test_a_stop_string_cancels_too(shared_front: FrontProcess) -> None:
    tag = secrets.token_hex(8)
    with shared_front.client() as client:
        text = script(tag=tag, say="abSTOP" + "c" * 3000, delay=0.01)
        body = simple("/v1/chat/completions", text, stop="STOP")
        assert post(client, "/v1/chat/completions", body)["choices"][0]["message"]["content"] == "ab"
    until(lambda: cancelled(shared_front, tag))


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
