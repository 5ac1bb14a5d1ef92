"""Asking servers elsewhere, against a small real HTTP server that plays other engines and broken ones."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ftengine.errors import FtError
from ftlaunch.launch import remote
from ftlaunch.launch.connect import output_limit, remote_endpoint


class Other:
    """Answers GETs from `answers`: path -> list of (status, body), the last one again and again."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, str]]] = {}
        self.keys: list[str | None] = []
        other = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                other.keys.append(self.headers.get("Authorization"))
                queue = other.answers.get(self.path, [(404, "not found")])
                status, body = queue.pop(0) if len(queue) > 1 else queue[0]
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", body)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.close()


def models(*entries: dict[str, object]) -> list[tuple[int, str]]:
    return [(200, json.dumps({"data": list(entries)}))]


@pytest.mark.parametrize(
    ("typed", "base"),
    [
        ("http://127.0.0.1:1919", "http://127.0.0.1:1919"),
        ("http://host/v1/", "http://host"),
        ("127.0.0.1:1919", "http://127.0.0.1:1919"),
        ("https://gpu.example/llm/v1", "https://gpu.example/llm"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_base_url(typed: str, base: str) -> None:
    assert remote.base_url(typed) == base


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "ftp://x",
        "file:///etc/passwd",
        "http://",
        "http://x:99999",
        "http://a?b",
        "http://u:p@h",
        "http://a/b c",
        "http://a\x1b",
    ],
)
def test_no_base_url(typed: str) -> None:
    with pytest.raises(FtError):
        remote.base_url(typed)


def test_waits_while_it_loads(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.01)
    loading = [(200, json.dumps({"status": "loading", "stage": "weights", "progress": p})) for p in (0.1, 0.6)]
    other.answers["/health"] = [*loading, (200, '{"status": "ready"}')]
    shown: list[tuple[str, float]] = []
    remote.wait_loaded(other.url, None, lambda stage, done: shown.append((stage, done)))
    assert shown == [("weights", 0.1), ("weights", 0.6)]


@pytest.mark.parametrize("body", ["ok", "[]", "{}", '{"status": "ok"}'])
def test_servers_without_our_health_are_ready(body: str, other: Other) -> None:
    other.answers["/health"] = [(200, body)]
    remote.wait_loaded(other.url, None, lambda stage, done: pytest.fail("does not load"))


@pytest.mark.parametrize("error", ['{"message": "no weights"}', '"no weights"'])
def test_failed_server(error: str, other: Other) -> None:
    other.answers["/health"] = [(200, f'{{"status": "failed", "error": {error}}}')]
    with pytest.raises(FtError, match="no weights"):
        remote.wait_loaded(other.url, None, lambda stage, done: None)


def test_progress_that_is_no_number(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.01)
    other.answers["/health"] = [(200, '{"status": "loading", "progress": "half"}'), (200, "{}")]
    shown: list[float] = []
    remote.wait_loaded(other.url, None, lambda stage, done: shown.append(done))
    assert shown == [0.0]


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.9\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"]
)
def test_not_http(said: bytes) -> None:
    """What a port of another protocol, or a broken server, says is an answer of ours, not an unexpected exception."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_say, args=(listening, said))
        thread.start()
        with pytest.raises(FtError, match="does not speak HTTP"):
            remote.model_entry(f"http://127.0.0.1:{listening.getsockname()[1]}", None, None)
        thread.join()


def _say(listening: socket.socket, said: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(said)


def test_entry_and_key(other: Other) -> None:
    other.answers["/v1/models"] = models({"id": "a"}, {"id": "b", "max_model_len": 4096})
    assert remote.model_entry(other.url, "k", None)["id"] == "a"
    assert remote.model_entry(other.url, None, "b")["max_model_len"] == 4096
    assert other.keys == ["Bearer k", None]


@pytest.mark.parametrize("key", ["sekrit\r", "sek\nrit", "sekrit\u20ac"])
def test_a_key_that_no_header_can_carry_is_not_shown(key: str, other: Other) -> None:
    with pytest.raises(FtError, match="FT_API_KEY") as caught:
        remote.model_entry(other.url, key, None)
    assert "sek" not in str(caught.value) + caught.value.next_step


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, "{}"), "wants a key"),
        ((404, "no"), "names no model"),
        ((200, "<html>"), "names no model"),
        ((200, "[" * 100_000), "names no model"),
        ((200, '{"data": [1, {}]}'), "names no model"),
        ((200, '{"data": [{"id": "a"}]}'), "has no model b"),
    ],
)
def test_no_entry(answer: tuple[int, str], said: str, other: Other) -> None:
    other.answers["/v1/models"] = [answer]
    with pytest.raises(FtError, match=said):
        remote.model_entry(other.url, None, "b")


def test_loopback_is_never_asked_through_a_proxy(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    other.answers["/v1/models"] = models({"id": "a"})
    assert remote.model_entry(other.url, None, None) == {"id": "a"}


@pytest.mark.parametrize(
    ("entry", "typed", "window"),
    [
        ({"context_length": 65_536}, None, 65_536),
        ({"max_model_len": 4_096}, None, 4_096),
        ({"context_length": 65_536}, 8_192, 8_192),
        ({"context_length": 65_536}, 999_999, 65_536),
        ({}, 8_192, 8_192),
    ],
)
def test_window(entry: dict[str, object], typed: int | None, window: int) -> None:
    assert remote_endpoint("http://h", None, {"id": "m", **entry}, typed).context_window == window


def test_unknown_window_has_to_be_stated() -> None:
    with pytest.raises(FtError) as caught:
        remote_endpoint("http://h", None, {"id": "m"}, None)
    assert "--context" in caught.value.next_step


@pytest.mark.parametrize(
    ("context", "stated", "limit"),
    [(8_192, None, 2_048), (8_192, 512, 512), (1_000_000, None, 32_000), (131_072, 0, 32_000)],
)
def test_output_limit(context: int, stated: object, limit: int) -> None:
    assert output_limit(context, stated) == limit


def test_a_redirection_gets_no_key(other: Other) -> None:
    elsewhere = Other()
    try:
        other.answers["/v1/models"] = [(302, f"{elsewhere.url}/v1/models")]
        elsewhere.answers["/v1/models"] = models({"id": "m"})
        with pytest.raises(FtError, match="HTTP 302"):
            remote.model_entry(other.url, "secret", None)
        assert other.keys == ["Bearer secret"]
        assert elsewhere.keys == []
    finally:
        elsewhere.close()
