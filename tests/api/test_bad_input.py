"""Bad requests: 4xx in that API's envelope, under 100 ms, never 5xx (faults.md rows 14 and 15)."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.fronts import MODEL, FrontProcess, front
from tests.api.talk import PATHS, post, script, simple
from tests.support.timing import quickest, seconds

LIMIT_SECONDS = 0.1


def check_envelope(path: str, response: httpx.Response) -> dict[str, Any]:
    """Returns the inner error."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def send(client: httpx.Client, path: str, content: bytes) -> httpx.Response:
    """Asserts the time limit, with more tries for a machine that is busy with something else."""
    for _ in range(6):
        begun = time.perf_counter()
        response = client.post(path, content=content, headers={"content-type": "application/json"})
        if time.perf_counter() - begun < LIMIT_SECONDS:
            return response
    raise AssertionError(f"took longer than {LIMIT_SECONDS} s, six times")


MALFORMED = {
    "empty": b"",
    "cut": b'{"messages": [',
    "array": b"[]",
    "number": b"3",
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "temperature": NaN}',
    "Infinity": b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "top_p": Infinity}',
    "huge float": b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "top_p": 1e999}',
    "huge int": b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "seed": '
    + b"9" * 5000
    + b"}",
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep unknown field": b'{"zzz": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "bad UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}], "input": "\xff", "prompt": "\xff"}',
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "trailing": b'{"messages": [], "input": [], "prompt": []} x',
    "single quotes": b"{'messages': []}",
}


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(client: httpx.Client, path: str, name: str) -> None:
    response = send(client, path, MALFORMED[name])
    assert response.status_code == 400, response.text
    check_envelope(path, response)


WRONG = [
    {"model": "nobody"},
    {"model": 3},
    {"max_tokens": 0, "max_output_tokens": 0},
    {"max_tokens": -1, "max_output_tokens": -1},
    {"max_tokens": "5", "max_output_tokens": "5"},
    {"max_tokens": 1.5, "max_output_tokens": 1.5},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": "hot"},
    {"top_p": 1.5},
    {"top_k": -2},
    {"min_p": 2},
    {"seed": "x"},
    {"seed": 10**30},
    {"repetition_penalty": 0},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"999999": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {str(number): 0 for number in range(2000)}},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [257]},
    {"stream": "yes"},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: json.dumps(fields)[:40])
def test_wrong_field(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    response = send(client, path, json.dumps({**simple(path, "hi"), **fields}).encode())
    assert response.status_code == (404 if fields.get("model") == "nobody" else 400), response.text
    error = check_envelope(path, response)
    assert any(field in error["message"] for field in fields), error
    if path != "/v1/messages":
        assert any(field in (error["param"] or "") for field in fields)


MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "x"}
STRUCTURE = [
    (MESSAGES, {}, "messages"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (MESSAGES, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (MESSAGES, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (MESSAGES, {"messages": [USER], "tools": [{"name": ""}]}, "tools[0].name"),
    (MESSAGES, {"messages": [USER], "tools": [{"name": "a", "input_schema": 3}]}, "tools[0].input_schema"),
    (MESSAGES, {"messages": [USER], "tool_choice": {"type": "tool"}}, "tool_choice"),
    (MESSAGES, {"messages": [USER], "stop_sequences": ["x"] * 100}, "stop_sequences"),
    (MESSAGES, {"messages": [USER], "stop_sequences": "x"}, "stop_sequences"),
    (MESSAGES, {"messages": [USER], "system": 3}, "system"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": [USER], "tool_choice": "maybe"}, "tool_choice"),
    (CHAT, {"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
    (MESSAGES, {"messages": [USER], "tool_choice": {"type": "tool", "name": "none"}}, "tool_choice"),
    (CHAT, {"messages": [USER], "n": 10**6}, "n"),
    (CHAT, {"messages": [USER], "n": 0}, "n"),
    (CHAT, {"messages": [USER], "stop": ["x"] * 10**5}, "stop"),
    (CHAT, {"messages": [USER], "stop": "x" * 2000}, "stop"),
    (CHAT, {"messages": [USER], "top_logprobs": 21}, "top_logprobs"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": ""}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": 3}, "input"),
    (RESPONSES, {"input": [3]}, "input[0]"),
    (RESPONSES, {"input": [{"type": "message", "role": "user", "content": 3}]}, "input[0].content"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    (RESPONSES, {"input": [{"type": "additional_tools"}]}, "input[0].tools"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    (RESPONSES, {"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    (RESPONSES, {"input": "x", "background": True}, "background"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "x"]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [99999]}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 100}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "best_of": 5}, "best_of"),
]


@pytest.mark.parametrize(("path", "body", "field"), STRUCTURE)
def test_wrong_structure_names_its_field(client: httpx.Client, path: str, body: dict[str, Any], field: str) -> None:
    response = send(client, path, json.dumps(body).encode())
    assert response.status_code == 400, response.text
    assert check_envelope(path, response)["message"].startswith(field)


def test_schemas_that_refer_to_themselves_or_are_deep(client: httpx.Client) -> None:
    recursive = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    body = {"messages": [{"role": "user", "content": script(say="ok")}]}
    tool = {"name": "t", "input_schema": recursive}
    assert post(client, MESSAGES, {**body, "tools": [tool]})["content"][0]["text"] == "ok"
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": {"x": deep}}
    response = send(client, MESSAGES, json.dumps({**body, "tools": [{**tool, "input_schema": deep}]}).encode())
    assert response.status_code == 400
    assert "nested" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"messages": [USER] * 100_000}, 413),
        (MESSAGES, {"messages": [USER], "tools": [{"name": f"t{number}"} for number in range(10_000)]}, 413),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 1_000_000}]}, 400),
        (COMPLETIONS, {"prompt": [1] * 1_200_000}, 413),
    ],
    ids=["messages", "tools", "tokens", "ids"],
)
def test_too_much(shared_front: FrontProcess, client: httpx.Client, path: str, body: Any, status: int) -> None:
    content = json.dumps(body).encode()

    def refused() -> None:
        response = client.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == status, response.text
        check_envelope(path, response)

    assert quickest(lambda: seconds(refused), 2) < 2


def test_body_limit_before_all_is_read(shared_front: FrontProcess, client: httpx.Client) -> None:
    before = memory_of(shared_front)
    response = client.post(CHAT, content=b"x" * (50 << 20), headers={"content-type": "application/json"})
    assert response.status_code == 413
    check_envelope(CHAT, response)
    assert memory_of(shared_front) - before < 40 << 20


def test_body_of_unknown_length_stops_at_the_limit(client: httpx.Client) -> None:
    def pieces():
        for _ in range(50):
            yield b" " * (1 << 20)

    response = client.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    check_envelope(CHAT, response)


def memory_of(front: FrontProcess) -> int:
    import psutil

    return psutil.Process(front.process.pid).memory_info().rss


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("POST", "/v1/messages/batches", 404),
        ("GET", "/v1/messages", 405),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/responses", 405),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/" + "%00" * 10, 404),
        ("GET", "/" + "x" * 5000, 404),
    ],
)
def test_unknown_paths_and_methods(client: httpx.Client, method: str, path: str, status: int) -> None:
    content = {"json": {}} if method == "POST" else {}
    response = client.request(method, path, **content)
    assert response.status_code == status
    check_envelope(path, response)


def test_lone_surrogates_of_a_client_that_cut_a_character(client: httpx.Client) -> None:
    text = json.dumps(script(say="ok"))
    raw = f'{{"messages": [{{"role": "user", "content": "\\ud83d \\\\ud800"}}, {{"role": "user", "content": {text}}}]}}'
    response = send(client, CHAT, raw.encode())
    assert response.status_code == 200
    counted = send(client, "/v1/messages/count_tokens", raw.encode()).json()["input_tokens"]
    plain = {"messages": [{"role": "user", "content": "\ufffd \\ud800"}, {"role": "user", "content": script(say="ok")}]}
    assert counted == post(client, "/v1/messages/count_tokens", plain)["input_tokens"]


def test_unknown_fields_are_passed_over(client: httpx.Client) -> None:
    for path in PATHS:
        body = simple(path, script(say="ok"), unheard_of={"a": [1]}, user=3, model=MODEL)
        assert post(client, path, body)


def test_a_large_body_takes_at_most_twice_its_size(tmp_path: Path) -> None:
    size = 30 << 20
    content = b'{"messages": [{"role": "user", "content": "' + b"word " * (size // 5) + b'"}]}'
    with front(tmp_path / "model") as running, running.client() as client:
        post(client, CHAT, simple(CHAT, script(say="warm")))
        before = memory_of(running)
        response = client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert peak_memory_of(running) - before < 2 * size + (12 << 20)


def peak_memory_of(front: FrontProcess) -> int:
    status = Path(f"/proc/{front.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10


def test_a_client_cannot_write_lines_into_the_log(shared_front: FrontProcess, client: httpx.Client) -> None:
    body = simple(CHAT, script(say="ok"), tools=[{"type": "x\n00:00:00 E forged"}])
    post(client, CHAT, body)
    assert "\\n00:00:00 E forged" in shared_front.log()
    assert "\n00:00:00 E forged" not in shared_front.log()


def test_compressed_bodies_are_refused_in_words(client: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "zstd"}
    response = client.post(CHAT, content=b"(\xb5/\xfd", headers=headers)
    assert response.status_code == 415
    assert "Content-Encoding" in check_envelope(CHAT, response)["message"]
