"""Web pages, DNS rebinding and other local users: refused before anything happens (faults.md row 17)."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ftengine.api.guard import Guard
from ftengine.errors import FtError
from tests.api.fronts import FrontProcess, front, settings, spawn
from tests.api.talk import PATHS, script, simple
from tests.api.test_leaving import reached

KEY = "s3cret-kéy"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with front(tmp_path_factory.mktemp("locked") / "model", api_key=KEY) as running:
        yield running


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.com"}, 403),
        ({"host": "localhost.evil.com"}, 403),
        ({"host": "127.0.0.1.nip.io"}, 403),
        ({"host": "printer.local"}, 403),
        ({"host": "192.168.1.2"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:99"}, 200),
        ({"origin": "https://evil.com"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://[bad"}, 403),
        ({"origin": "http://localhost:999999"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_who_may_ask(shared_front: FrontProcess, headers: dict[str, str], status: int) -> None:
    tag = secrets.token_hex(8)
    with shared_front.client() as client:
        refused = client.get("/v1/stats").json()["refused"]
        content = httpx.Request("POST", "http://x", json=simple(CHAT, script(say="a", tag=tag))).content
        response = client.post(CHAT, content=content, headers={"content-type": "application/json", **headers})
        counted = client.get("/v1/stats").json()["refused"]
    assert response.status_code == status, response.text
    assert counted.get(str(status), 0) == refused.get(str(status), 0) + (status != 200)
    assert not [name for name in response.headers if name.startswith("access-control-")]
    if status != 200:
        assert response.json()["error"]["message"]
        assert not reached(shared_front, tag), "a refused request has no effect"


def test_own_origin_is_allowed(shared_front: FrontProcess, client: httpx.Client) -> None:
    assert client.get("/health", headers={"origin": shared_front.url}).status_code == 200


def test_preflight_gets_no_permission(client: httpx.Client) -> None:
    asked = {"origin": "https://evil.com", "access-control-request-method": "POST"}
    response = client.options(CHAT, headers=asked)
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control-")]
    assert client.options(CHAT, headers={"access-control-request-method": "POST"}).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {KEY}".encode()}, 401),
        ({"x-api-key": b""}, 401),
        ({"authorization": f"Bearer {KEY}".encode()}, 200),
        ({"authorization": f"bearer {KEY}".encode()}, 200),
        ({"x-api-key": KEY.encode()}, 200),
        ({"authorization": b"Bearer of another vendor", "x-api-key": KEY.encode()}, 200),
    ],
)
def test_key(locked: FrontProcess, headers: dict[str, bytes], status: int) -> None:
    with locked.client() as client:
        for path in PATHS:
            response = client.post(path, json=simple(path, script(say="a")), headers=headers)
            assert response.status_code == status
        assert client.get("/v1/models", headers=headers).status_code == status
        assert client.get("/health", headers=headers).status_code == 200
    assert KEY not in locked.log()


def test_key_refusal_in_each_envelope(locked: FrontProcess) -> None:
    with locked.client() as client:
        ours = client.post("/v1/messages", json={})
        assert ours.json()["error"]["type"] == "authentication_error"
        assert ours.headers["www-authenticate"] == "Bearer", "RFC 9110, 15.5.2"
        assert client.post(CHAT, json={}).json()["error"]["type"] == "authentication_error"


def test_addresses_but_no_names_on_a_wildcard_bind(tmp_path: Path) -> None:
    guard = Guard(
        app=None,
        settings=settings(tmp_path, host="0.0.0.0", api_key="k", allowed_hosts=("box.lan",)),
        refused=Counter(),
    )
    for name, allowed in {"10.1.2.3": True, "box.lan:80": True, "localhost": True, "evil.com": False}.items():
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/health",
            "headers": [(b"host", name.encode())],
            "server": ("10.1.2.3", 1919),
        }
        if allowed:
            guard._check(scope)
        else:
            with pytest.raises(FtError):
                guard._check(scope)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.invalid"])
def test_no_bind_beyond_loopback_without_a_key(tmp_path: Path, host: str) -> None:
    running = spawn(tmp_path / "model", host=host)
    assert running.process.wait(60) == 3
    assert "an API key is needed" in running.log()
    assert "--api-key" in running.log()
    assert not running.engine_events("start")


def test_no_start_with_a_key_that_no_client_can_send(tmp_path: Path) -> None:
    running = spawn(tmp_path / "model", api_key="  ")
    assert running.process.wait(60) == 3
    assert "the API key is blank" in running.log()
