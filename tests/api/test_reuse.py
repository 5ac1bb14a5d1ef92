"""What is left of a prompt in the whole server: front, engine process and a small random model, through HTTP.

The reference for every answer is a server whose prompt cache is off.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.fronts import until
from tests.models import tiny
from tests.support.serving import SCRIPTED_CHECKPOINT, RunningServer, serve

PATH = "/v1/messages"
FLAGS = ("--dtype", "float32", "--context", "8192", "--max-prefill-length", "64", "--threads", "1")
NO_CACHE = ("--cache-device", "0", "--cache-host", "0", "--cache-disk", "0")


KINDS = [pytest.param("qwen3.5", id="recurrent"), pytest.param("qwen3", id="attention", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    tiny.write(request.param, folder, vocab_size=8192, max_position_embeddings=8192)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(SCRIPTED_CHECKPOINT / name, folder / name)
    tiny.change_config(folder, eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(checkpoint, tmp_path_factory.mktemp("home"), *FLAGS, "--cache-disk", "0") as running:
        yield running
        assert "books are wrong" not in running.log_text()


@pytest.fixture(scope="module")
def cold(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(checkpoint, tmp_path_factory.mktemp("cold"), *FLAGS, *NO_CACHE) as running:
        yield running


def body(text: str, *, words: int = 200, **fields: Any) -> dict[str, Any]:
    long = " ".join(f"{text}-{number}" for number in range(words))
    return {"messages": [{"role": "user", "content": long}], "max_tokens": 12, **fields}


def ask(server: RunningServer, asked: dict[str, Any], **headers: str) -> tuple[list[Any], dict[str, int]]:
    response = httpx.post(f"{server.url}{PATH}", json=asked, headers=headers, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()["content"], response.json()["usage"]


def leave(server: RunningServer, asked: dict[str, Any], *, after: str) -> None:
    """Ask for a stream, and close the connection as soon as `after` was seen in it."""
    with (
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
        client.stream("POST", PATH, json={**asked, "stream": True}) as response,
    ):
        seen = ""
        for piece in response.iter_text():
            seen += piece
            if after in seen:
                break
    until(lambda: server.stats()["running"] == server.stats()["engine"]["requests"]["running"] == 0)


def prompt_of(usage: dict[str, int]) -> int:
    return sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))


def test_the_same_prompt_again_costs_one_token(server: RunningServer, cold: RunningServer) -> None:
    asked = body("twice")
    first, usage = ask(server, asked)
    again, more = ask(server, asked)
    assert first == again == ask(cold, asked)[0]
    assert usage["input_tokens"] == more["input_tokens"] == 1
    assert more["cache_read_input_tokens"] == usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert prompt_of(usage) == prompt_of(more) > 600


def test_a_client_that_leaves_while_it_is_answered_keeps_its_prompt(server: RunningServer, cold: RunningServer) -> None:
    asked = body("decode")
    leave(server, {**asked, "max_tokens": 4000}, after="content_block_delta")
    content, usage = ask(server, asked)
    assert usage["input_tokens"] == 1
    assert usage["cache_creation_input_tokens"] == 0
    assert content == ask(cold, asked)[0]


def test_a_client_that_leaves_during_prefill_keeps_what_was_computed(
    server: RunningServer, cold: RunningServer
) -> None:
    for attempt in range(30):  # the engine may be faster than this process
        asked = body(f"prefill{attempt}", words=1200)
        before = server.stats()["engine"]["tokens"]["prefilled"]
        leave(server, asked, after="message_start")
        computed = server.stats()["engine"]["tokens"]["prefilled"] - before
        content, usage = ask(server, asked)
        assert usage["cache_read_input_tokens"] >= computed
        assert content == ask(cold, asked)[0]
        if 0 < computed < prompt_of(usage) - 1:
            return
    pytest.fail("no prompt was left in the middle")


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_leave_at_any_moment_and_nothing_is_lost_or_held(
    server: RunningServer, cold: RunningServer, count: int
) -> None:
    """faults.md row 13, with prompts that begin alike, so that all share pages and places."""
    rng = random.Random(13)
    bodies = [body("crowd", words=words, max_tokens=rng.choice((1, 8, 200))) for words in (60, 61, 120, 300)]
    for _ in range(count):
        raw = json.dumps({**rng.choice(bodies), "stream": rng.random() < 0.7}).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
        )
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
            connection.sendall(f"{head}\r\n\r\n".encode() + raw)
            time.sleep(rng.choice((0.0, 0.002, 0.01, 0.05, 0.1)))
    until(lambda: server.stats()["running"] == server.stats()["engine"]["requests"]["running"] == 0, 30)
    assert server.stats()["engine"]["cache"]["pages_used"] == 0
    for asked in bodies:
        content, usage = ask(server, asked)
        assert content == ask(cold, asked)[0]
        assert usage["cache_read_input_tokens"] > 0


def test_the_log_names_what_was_reused(server: RunningServer) -> None:
    asked = body("logged")
    for _ in range(2):
        ask(server, asked, **{"x-session-id": "ses_secret"})
    line = [text for text in server.log_text().splitlines() if " session " in text][-1]
    assert " reused from device" in line
    assert "ses_secret" not in server.log_text()


def test_a_cache_that_is_off_says_so(cold: RunningServer) -> None:
    asked = body("off")
    ask(cold, asked)
    time.sleep(0.1)
    _, usage = ask(cold, asked)
    assert usage["cache_creation_input_tokens"] == 0


AGENT_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("bash", "read", "edit")]


def echoed(content: list[Any]) -> list[Any]:
    """As a client that keeps no reasoning sends an answer back: arguments in another order and with one more."""
    blocks = [dict(block) for block in content if block["type"] != "thinking"]
    for block in blocks:
        if "input" in block:
            block["input"] = {"background": False, **dict(reversed(block["input"].items()))}
    return blocks


def step(server: RunningServer, messages: list[Any]) -> dict[str, int]:
    """One more step of the agent's task: the answer and its tool's result are appended to `messages`."""
    asked = {"messages": messages, "tools": AGENT_TOOLS, "max_tokens": 500, "thinking": {"type": "adaptive"}}
    content, usage = ask(server, asked, **{"x-session-id": "agent"})
    assert content[0]["type"] == "thinking"
    call = content[-1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": f"done {len(messages)}"}
    messages += [{"role": "assistant", "content": echoed(content)}, {"role": "user", "content": [result]}]
    return usage


def test_an_answer_that_comes_back_in_other_words_is_known_and_after_a_restart_too(tmp_path: Path) -> None:
    """All that was computed for a step is reused by the next one: its prompt, and its answer but for the last token."""
    messages: list[Any] = [{"role": "user", "content": "Make /tmp/somewhere/hello.py print a word. " * 60}]
    before = 0
    for steps in (2, 2):
        with serve(SCRIPTED_CHECKPOINT, tmp_path, "--context", "8192", "--cache-disk", "1GB") as running:
            for _ in range(steps):
                usage = step(running, messages)
                assert usage["cache_read_input_tokens"] >= before - 1, running.log_text()
                before = prompt_of(usage) + usage["output_tokens"]
