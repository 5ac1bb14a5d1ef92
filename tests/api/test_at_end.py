"""What a server hands on as it ends: the counters of /v1/stats from just before, whichever way it ends."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ftengine import leases
from tests.api.fronts import FrontProcess, front
from tests.api.talk import post, script, simple


def handed_on(running: FrontProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((running.folder / "end.json").read_bytes())
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_at_a_signal(tmp_path: Path, number: int) -> None:
    with front(tmp_path / "model") as running, running.client() as client:
        post(client, "/v1/messages", simple("/v1/messages", script(say="abc")))
        before = client.get("/v1/stats").json()
        assert running.end(number) == 0
    found = handed_on(running)
    assert found.pop("uptime_seconds") >= before.pop("uptime_seconds")
    assert found == before
    assert found["engine"] == {"running": 0}


def test_when_the_last_lease_ends(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    lease = leases.acquire(folder)  # before the server looks for one
    with front(tmp_path / "model", lease_dir=str(folder)) as running:
        with lease, running.client() as client:
            post(client, "/v1/messages", simple("/v1/messages", script(say="abc")))
        assert running.process.wait(60) == 0
    assert handed_on(running)["answers"] == {"messages": 1}


@pytest.mark.slow
def test_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    """Stopped, as amid a long step: what it told while the server was idle. The end is not held up by more than the
    engine's own patience of 3.3 s.
    """
    with front(tmp_path / "model", save_seconds=0.05) as running, running.client() as client:
        post(client, "/v1/messages", simple("/v1/messages", script(say="abc")))
        time.sleep(0.4)
        os.kill(client.get("/health").json()["engine_pid"], signal.SIGSTOP)
        begun = time.monotonic()
        assert running.end() == 0
        assert time.monotonic() - begun < 3.3 + 1.5
    assert handed_on(running)["answers"] == {"messages": 1}


def test_an_engine_that_never_told_anything(tmp_path: Path) -> None:
    with front(tmp_path / "model", engine={"load": 60}) as running:
        assert running.end() == 0
    assert not (running.folder / "end.json").exists()


def test_first_tokens_of_answers_that_were_alone(tmp_path: Path) -> None:
    """Two at once tell nothing of a prompt's time, and one that waits for the model nothing either."""
    with front(tmp_path / "model") as running, running.client() as client:
        text = script(say="abc", hold=0.2, cached=7)
        post(client, "/v1/completions", simple("/v1/completions", text))
        post(client, "/v1/completions", {"prompt": script(say="abc", delay=0.1), "n": 2, "max_tokens": 50})
        (found,) = client.get("/v1/stats").json()["first_tokens"]
    assert (found["prompt"], found["cached"]) == (len(text), 7)
    assert 0.2 <= found["seconds"] < 20


def test_a_prompt_that_waited_for_the_model_is_timed_from_its_start(tmp_path: Path) -> None:
    asked = simple("/v1/completions", script(say="abc"))
    with (
        front(tmp_path / "model", engine={"gate": True}) as running,
        running.client() as client,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(post, client, "/v1/completions", asked)
        time.sleep(0.5)
        opened = time.monotonic()
        running.open_gate()
        answer.result()
        longest = time.monotonic() - opened
        (found,) = client.get("/v1/stats").json()["first_tokens"]
    assert 0 < found["seconds"] <= longest
