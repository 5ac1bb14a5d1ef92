"""POST /v1/trace: a recording that ends, one that is refused, a client that leaves, an engine that dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.fronts import FrontProcess, front, until
from tests.api.scripted_engine import TRACE
from tests.api.test_leaving import count, open_request


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with front(tmp_path_factory.mktemp("trace") / "model") as running:
        yield running


def test_the_engines_bytes_are_the_answer(server: FrontProcess) -> None:
    with server.client() as client:
        response = client.post("/v1/trace", json={"steps": 4096})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.content == TRACE
    assert server.engine_events("trace")[-1]["steps"] == 4096


@pytest.fixture
def script(server: FrontProcess) -> Iterator[Path]:
    path = server.folder / "trace"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("body", [{}, {"steps": 0}, {"steps": 4097}, {"steps": "5"}, {"steps": None}])
def test_bad_numbers_do_not_reach_the_engine(server: FrontProcess, body: dict) -> None:
    before = count(server, "trace")
    with server.client() as client:
        response = client.post("/v1/trace", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "steps"
    assert count(server, "trace") == before


def test_a_refusal_is_told(server: FrontProcess, script: Path) -> None:
    script.write_text("refuse")
    with server.client() as client:
        response = client.post("/v1/trace", json={"steps": 4})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "nothing to record")


def test_one_at_a_time_and_it_ends_with_its_client(server: FrontProcess, script: Path) -> None:
    script.write_text("hold")
    begun, ended = count(server, "trace"), count(server, "stop trace")
    connection = open_request(server, "/v1/trace", {"steps": 4})
    until(lambda: count(server, "trace") == begun + 1)
    with server.client() as client:
        busy = client.post("/v1/trace", json={"steps": 4})
        assert (busy.status_code, busy.json()["error"]["type"]) == (503, "overloaded_error")
        assert count(server, "trace") == begun + 1
        connection.close()
        until(lambda: count(server, "stop trace") == ended + 1)
        assert server.engine_events("stop trace")[-1]["id"] == server.engine_events("trace")[-1]["id"]
        script.unlink()
        assert client.post("/v1/trace", json={"steps": 4}).content == TRACE


def test_an_engine_that_dies(tmp_path: Path) -> None:
    with front(tmp_path / "model") as running, running.client() as client:
        script = running.folder / "trace"
        script.write_text("die")
        response = client.post("/v1/trace", json={"steps": 4})
        script.unlink()
        assert response.status_code == 503
        assert "the engine process ended" in response.json()["error"]["message"]
        assert client.post("/v1/trace", json={"steps": 4}).content == TRACE
