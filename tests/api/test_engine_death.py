"""The engine dies, cannot start, or refuses: what the streams, the next request and /health say."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.fronts import FrontProcess, front, spawn, until, wait_listening, wait_status
from tests.api.sse_reader import Frame, frames
from tests.api.talk import PATHS, post, script, simple, stream


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with front(tmp_path_factory.mktemp("mortal") / "model") as running:
        yield running


def check_error_event(path: str, last: Frame) -> None:
    """Each API's own last event, in the form after which its clients try again."""
    if path == "/v1/messages":
        assert last.event == "error"
        assert last.data["type"] == "error"
        assert last.data["error"]["type"] == "overloaded_error"
    elif path == "/v1/responses":
        assert last.event == "response.failed"
        assert last.data["response"]["status"] == "failed"
        assert last.data["response"]["error"]["code"] == "server_error"
    else:
        assert last.event is None
        assert last.data["error"]["message"]


def test_killed_mid_stream_and_the_next_request_is_answered(tmp_path: Path) -> None:
    with front(tmp_path / "model") as running, running.client() as client:
        for deaths, path in enumerate(PATHS, start=1):
            body = simple(path, script(say="z" * 2000, delay=0.02), stream=True)
            with client.stream("POST", path, json=body) as response:
                received = []
                for frame in frames(response.iter_bytes()):
                    received.append(frame)
                    if len(received) == 6:
                        os.kill(client.get("/health").json()["engine_pid"], signal.SIGKILL)
            check_error_event(path, received[-1])
            assert "zz" in str(received[:-1])
            post(client, path, simple(path, script(say="alive")))  # waits for the new engine
            assert client.get("/health").json()["restarts"] == deaths


def test_whole_answers_get_503(mortal: FrontProcess) -> None:
    wait_status(mortal, "ready")
    with mortal.client() as client:
        response = client.post("/v1/messages", json=simple("/v1/messages", script(say="a", die=1)))
        assert response.status_code == 529
        assert response.json()["error"]["type"] == "overloaded_error"
        wait_status(mortal, "ready")
        response = client.post("/v1/responses", json=simple("/v1/responses", script(say="a", die=1)))
        assert response.status_code == 503
        wait_status(mortal, "ready")


@pytest.mark.parametrize("path", PATHS)
def test_refused_by_the_engine(mortal: FrontProcess, path: str) -> None:
    wait_status(mortal, "ready")
    with mortal.client() as client:
        whole = client.post(path, json=simple(path, script(fail="no room", overloaded=True)))
        assert whole.status_code == (529 if path == "/v1/messages" else 503)
        assert "no room" in whole.text
        last = stream(client, path, simple(path, script(fail="no room", overloaded=True)))[-1]
        check_error_event(path, last)


def test_a_start_that_cannot_work_ends_with_the_engines_sentence(tmp_path: Path) -> None:
    sentence = "the model is of a kind that is not served"
    with front(tmp_path / "told", engine={"fatal": sentence}, failure_seconds=120) as running:
        health = wait_status(running, "failed")
        assert health["error"] == {"message": sentence, "next_step": "ft list"}
        running.process.kill()
        running.process.wait()
    running = spawn_failing(tmp_path / "ended", fatal=sentence)
    assert running.process.wait(60) == 3
    assert f"FtError: {sentence} [ft list]" in running.log()


def spawn_failing(folder: Path, **engine: Any) -> FrontProcess:
    """Not waited for: its end may come before anybody looks."""
    folder.mkdir()
    (folder / "engine.json").write_text(json.dumps(engine))
    return spawn(folder)


def test_an_engine_that_dies_while_loading_is_not_tried_for_ever(tmp_path: Path) -> None:
    running = spawn_failing(tmp_path / "model", die_loading=7)
    assert running.process.wait(60) == 3
    assert "ended 2 times while it was loading: exit code 7" in running.log()
    assert len(running.engine_events("start")) == 2


def test_a_crash_loop_ends_in_503_with_a_reason(tmp_path: Path) -> None:
    with front(tmp_path / "model") as running, running.client() as client:
        for death in range(5):
            wait_status(running, "ready")
            client.post("/v1/chat/completions", json=simple("/v1/chat/completions", script(die=9)))
            until(lambda death=death: client.get("/health").json()["restarts"] > death or _failed(client))
        health = wait_status(running, "failed")
        assert "5 times in a row" in health["error"]["message"]
        response = client.post("/v1/responses", json=simple("/v1/responses", "hi", stream=True))
        assert response.status_code == 503
        assert "5 times in a row" in response.json()["error"]["message"]


def _failed(client: Any) -> bool:
    return client.get("/health").json()["status"] == "failed"


def test_a_restart_that_is_refused_is_told_and_tried_again(tmp_path: Path) -> None:
    """As when the model's folder is gone: nobody waits in the dark, and what comes back is found."""
    sentence = "the model is not there"
    with front(tmp_path / "model") as running, running.client() as client:
        (running.folder / "engine.json").write_text(json.dumps({"fatal": sentence}))
        os.kill(client.get("/health").json()["engine_pid"], signal.SIGKILL)
        wait_status(running, "restarting")
        for path in PATHS:  # the first waits for the engine, and only until its restart has failed
            response = client.post(path, json=simple(path, "hi"))
            assert response.status_code == (529 if path == "/v1/messages" else 503)
            assert response.json()["error"]["message"] == f"the engine cannot be started again: {sentence}"
        health = client.get("/health").json()
        assert health["status"] == "restarting"
        assert health["error"] == {"message": f"the engine cannot be started again: {sentence}", "next_step": "ft list"}
        (running.folder / "engine.json").unlink()
        assert wait_status(running, "ready")["error"] is None
        post(client, PATHS[0], simple(PATHS[0], script(say="alive")))


def test_a_refused_start_is_no_overload(tmp_path: Path) -> None:
    """Whoever waits meanwhile learns why, and not that it might try again."""
    sentence = "the model is of a kind that is not served"
    with front(tmp_path / "model", engine={"fatal": sentence}, failure_seconds=120) as running:
        with running.client() as client:
            for path in PATHS:
                response = client.post(path, json=simple(path, "hi"))
                assert response.status_code == 500
                assert response.json()["error"]["message"] == sentence
                assert response.json()["error"]["type"] in ("api_error", "server_error")
        running.process.kill()
        running.process.wait()


def test_requests_wait_for_an_engine_that_loads(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "engine.json").write_text('{"gate": true}')
    running = wait_listening(spawn(folder, heartbeat_seconds=0.3))
    try:
        with running.client() as client:
            assert client.get("/health").json()["status"] == "loading"
            body = simple("/v1/messages", script(say="early"), stream=True)
            with client.stream("POST", "/v1/messages", json=body) as response:  # its headers come before that
                received: list[str | None] = []
                for frame in frames(response.iter_bytes()):
                    received.append(frame.event)
                    if received.count("ping") == 3:
                        running.open_gate()
            assert received.count("ping") >= 3
            assert received[-1] == "message_stop"
    finally:
        running.end()
