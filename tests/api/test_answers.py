"""Answers given back to the dialect: what it is told, when, in which thread; kept over a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ftengine.api.answers import answers_path
from ftengine.config import EngineConfig
from tests.api.byte_dialect import END
from tests.api.fronts import FrontProcess, events, front, until
from tests.api.talk import ANSWER, CALL, TOOL, post, script, simple, stream
from tests.api.test_leaving import count, open_request

CHAT = ("/v1/messages", "/v1/chat/completions", "/v1/responses")


def dialect_events(front: FrontProcess, kind: str) -> list[dict[str, Any]]:
    return events(front.folder / "dialect.log", kind)


@pytest.fixture(scope="module")
def modules_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """Whose every answer is waited for: nothing is told late."""
    with front(tmp_path_factory.mktemp("answers") / "model") as running:
        yield running


@pytest.fixture
def own_front(tmp_path: Path) -> Iterator[FrontProcess]:
    with front(tmp_path / "model") as running:
        yield running


def remembered(front: FrontProcess, count: int) -> list[dict[str, Any]]:
    until(lambda: len(dialect_events(front, "remember")) == count)
    return dialect_events(front, "remember")


@pytest.mark.parametrize("path", CHAT)
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_the_dialect_is_told_all_that_was_generated(modules_front: FrontProcess, path: str, streaming: bool) -> None:
    tool = {"name": "read", "description": "", "parameters": TOOL, "input_schema": TOOL, "type": "function"}
    tools = [{"type": "function", "function": tool}] if "chat" in path else [tool]
    if path == "/v1/messages":
        tools = [{"name": "read", "input_schema": TOOL}]
    body = simple(path, script(say=ANSWER + CALL), tools=tools)
    before = len(dialect_events(modules_front, "remember"))
    with modules_front.client() as client:
        stream(client, path, body) if streaming else post(client, path, body)
    told = remembered(modules_front, before + 1)[-1]
    assert (told["written"], told["last"]) == (ANSWER + CALL, END)
    assert told["thread"].startswith("render")
    given = told["given"]
    assert given[0].startswith("ReasoningDelta")
    assert given[-1] == 'ToolCallEnd(index=0, arguments=\'{"path": "ä.txt"}\')'


def test_the_next_prompt_is_rendered_when_the_answer_is_known(own_front: FrontProcess) -> None:
    """A client's next request may follow at once; here twenty of them do, on one connection."""
    with own_front.client() as client:
        for number in range(20):
            stream(client, "/v1/chat/completions", simple("/v1/chat/completions", script(say=f"{number}")))
    renders = dialect_events(own_front, "render")
    assert [event["remembered"] for event in renders] == list(range(20))


def test_what_was_cut_is_told_as_far_as_it_came(own_front: FrontProcess) -> None:
    """By max_tokens and by the client, not by a stop string; nothing of a completion."""
    path = "/v1/chat/completions"
    with own_front.client() as client:
        post(client, path, simple(path, script(say="abcdef"), max_tokens=4))
        assert remembered(own_front, 1)[-1]["written"] == "abcd"
        connection = open_request(
            own_front, path, simple(path, script(say="x" * 3000, delay=0.01, size=1), stream=True)
        )
        seen = b""
        while b'"content":"x' not in seen:
            seen += connection.recv(4096)
        connection.close()
        left = remembered(own_front, 2)[-1]["written"]
        assert left == "x" * len(left)
        assert 0 < len(left) < 3000
        post(client, path, simple(path, script(say="one STOP two"), stop="STOP"))
        post(client, "/v1/completions", {"prompt": script(say="text"), "max_tokens": 100})
        post(client, path, simple(path, script(say="last")))
    assert [event["written"] for event in remembered(own_front, 3)] == ["abcd", left, "last"]


def with_disk(folder: Path, **changes: Any) -> dict[str, Any]:
    config = EngineConfig(model_dir=str(folder), cache_dir=str(folder.parent / "cache" / "prompts"))
    return {"engine_config": msgspec.structs.replace(config, **changes)}


def test_answers_survive_a_restart(tmp_path: Path) -> None:
    folder, path = tmp_path / "model", "/v1/chat/completions"
    for expected in ([], ["first"]):
        with front(folder, **with_disk(folder)) as running:
            assert dialect_events(running, "load")[-1]["answers"] == expected
            with running.client() as client:
                post(client, path, simple(path, script(say="first")))
            assert running.end() == 0
    saves = dialect_events(running, "save")
    kept = answers_path(EngineConfig(model_dir=str(folder), cache_dir=str(tmp_path / "cache" / "prompts")))
    assert kept is not None
    assert {event["path"] for event in saves} == {str(kept)}
    assert kept.parent.stat().st_mode & 0o777 == 0o700


def test_answers_are_saved_while_idle_and_once(tmp_path: Path) -> None:
    folder, path = tmp_path / "model", "/v1/chat/completions"
    with front(folder, save_seconds=0.1, **with_disk(folder)) as running, running.client() as client:
        post(client, path, simple(path, script(say="a")))
        until(lambda: len(dialect_events(running, "save")) == 1)
        time.sleep(0.5)
        assert len(dialect_events(running, "save")) == 1
        submitted, long = count(running, "submit"), script(say="x" * 3000, delay=0.01, size=1)
        with open_request(running, path, simple(path, long, stream=True)):
            until(lambda: count(running, "submit") == submitted + 1)  # else the next one may come and go before it
            post(client, path, simple(path, script(say="b")))
            time.sleep(0.5)
            assert len(dialect_events(running, "save")) == 1  # not while it works
        until(lambda: len(dialect_events(running, "save")) >= 2)


@pytest.mark.parametrize("changes", [{"cache_disk": 0}, {"cache_dir": None}])
def test_nothing_is_kept_on_disk_where_it_is_not_wanted(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, path = tmp_path / "model", "/v1/chat/completions"
    with front(folder, save_seconds=0.1, **with_disk(folder, **changes)) as running:
        with running.client() as client:
            post(client, path, simple(path, script(say="a")))
        remembered(running, 1)
        time.sleep(0.3)
        assert running.end() == 0
    assert dialect_events(running, "save") == dialect_events(running, "load") == []
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_made_costs_a_line(tmp_path: Path) -> None:
    folder, path = tmp_path / "model", "/v1/chat/completions"
    (tmp_path / "cache").write_text("in the way")
    with front(folder, **with_disk(folder)) as running:
        with running.client() as client:
            post(client, path, simple(path, script(say="a")))
        assert running.end() == 0
    assert "are not kept" in running.log()
    assert "Traceback" not in running.log()


def test_boundaries_and_the_session_reach_the_engine(own_front: FrontProcess, tmp_path: Path) -> None:
    body = {**simple("/v1/chat/completions", "hi"), "prompt_cache_key": "secret-key", "user": "alice"}
    with own_front.client() as client:
        post(client, "/v1/chat/completions", body)
        post(client, "/v1/chat/completions", {**body, "prompt_cache_key": None, "user": None, "n": 2})
        post(client, "/v1/completions", {"prompt": "hi", "prompt_cache_key": "secret-key"})
    keyed, *bare, plain = own_front.engine_events("submit")
    prompt = "<user>hi<end><assistant>"
    assert keyed["boundaries"] == [[prompt.index("<assistant>"), "message"], [len(prompt), "prompt_end"]]
    assert keyed["boundary_tokens"] == [ord(">")]
    assert len(keyed["session"]) == 16
    assert [event["session"] for event in bare] == ["", ""]
    assert (plain["session"], plain["boundaries"], plain["boundary_tokens"]) == (keyed["session"], [], [])
    assert f"session {keyed['session'][:8]}:" in own_front.log()
    assert "secret-key" not in own_front.log()
    assert "alice" not in own_front.log()


@pytest.mark.parametrize("odd", [7, True, ["k"], {"k": {}}, "x" * 300_000, "\\ud800"])
def test_keys_of_odd_types_are_passed_over(client: httpx.Client, odd: Any) -> None:
    for path in (*CHAT, "/v1/completions"):
        fields = {"metadata": odd} if path == "/v1/messages" else {"prompt_cache_key": odd, "user": odd}
        response = client.post(path, json=simple(path, "hi", **fields))
        assert response.status_code == 200, response.text
