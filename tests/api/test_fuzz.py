"""Good requests, broken at random places: never 5xx, never a hang, nothing left running (faults.md row 14)."""

from __future__ import annotations

import copy
import json
import random
import time
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.api.fronts import FrontProcess, until
from tests.api.talk import TOOL, script

TEXT = script(say="ok")
USER = {"role": "user", "content": TEXT}
SAMPLING = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 1, "stop": ["x"], "stream": True}
CHAT_TOOL = {"type": "function", "function": {"name": "read", "description": "d", "parameters": TOOL}}
RESPONSES_TOOL = {"type": "function", "name": "read", "description": "d", "parameters": TOOL}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
GOOD: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/messages",
        {
            "model": "bytes-model",
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {}}]},
                {"role": "system", "content": "b"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "c", "name": "read", "input": {"path": "p"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "is_error": False,
                            "content": [{"type": "tool_reference", "tool_name": "read"}],
                        }
                    ],
                },
                USER,
            ],
            "tools": [{"name": "read", "description": "d", "input_schema": TOOL, "defer_loading": False}],
            "tool_choice": {"type": "tool", "name": "read", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 10},
            "stop_sequences": ["x"],
            **SAMPLING,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
                {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CHAT_CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
                USER,
            ],
            "tools": [CHAT_TOOL, {"type": "custom", "custom": {"name": "patch"}}],
            "tool_choice": {"type": "function", "function": {"name": "read"}},
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"include_usage": True},
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
            "logit_bias": {"5": 1},
            "chat_template_kwargs": {"enable_thinking": False},
            **SAMPLING,
        },
    ),
    ("/v1/completions", {"prompt": [TEXT, TEXT], "n": 2, "echo": True, "logprobs": 2, "best_of": 2, **SAMPLING}),
    (
        "/v1/responses",
        {
            "instructions": "i",
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
                {"type": "function_call", "call_id": "c", "name": "read", "namespace": "n", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
                {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "i"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "o"}]},
                {"type": "additional_tools", "tools": [RESPONSES_TOOL]},
                {"type": "tool_search_output", "call_id": "e", "tools": [RESPONSES_TOOL]},
                USER,
            ],
            "tools": [
                RESPONSES_TOOL,
                {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "d"}},
                {"type": "namespace", "name": "n", "tools": [RESPONSES_TOOL]},
            ],
            "tool_choice": {"type": "function", "name": "read"},
            "max_output_tokens": 5,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_object"}},
            "metadata": {"a": "b"},
            **SAMPLING,
        },
    ),
]
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    0.5,
    1e308,
    2**63,
    10**25,
    10**9,
    "",
    "x",
    "\x00",
    "\ud800",
    "😀" * 50,
    "x" * 5000,
    "user",
    "assistant",
    "tool_result",
    "function_call",
    "namespace",
    "[DONE]",
    [],
    {},
    [[[[]]]],
    [None],
    {"type": None},
    {"type": "text"},
    {"": {}},
    {"role": "user"},
]


def broken(seed: int) -> tuple[str, dict[str, Any]]:
    """A good request with one to four changes: a value replaced, removed, doubled or moved elsewhere."""
    dice = random.Random(seed)
    path, good = dice.choice(GOOD)
    body = copy.deepcopy(good)
    if path == "/v1/messages" and dice.random() < 0.2:
        path += "/count_tokens"
    for _ in range(dice.randint(1, 4)):
        places = list(_places(body))
        if not places:
            break
        where, key = dice.choice(places)
        change = dice.randrange(5)
        if change == 0:
            del where[key]
        elif change == 1:
            other, other_key = dice.choice(places)
            where[key] = copy.deepcopy(other[other_key])
        elif change == 2 and isinstance(where, list):
            where.extend(copy.deepcopy(where))
        else:
            where[key] = copy.deepcopy(dice.choice(ODD))
    return path, body


def _places(value: Any) -> Any:
    """Every (container, key) in the tree."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def fuzz(front: FrontProcess, cases: int) -> list[float]:
    """Sends `cases` broken requests; returns how long the refused ones took, in seconds."""
    times: list[float] = []

    @settings(
        max_examples=cases,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.integers(0, 1 << 62))
    def one(seed: int) -> None:
        path, body = broken(seed)
        begun = time.perf_counter()
        response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        if response.status_code != 200:
            times.append(time.perf_counter() - begun)
        assert response.status_code in (200, 400, 404, 413), f"{path} {response.status_code} {response.text} {body}"

    with front.client() as client:
        one()
        until(lambda: client.get("/v1/stats").json()["running"] == 0)
        assert client.get("/health").json()["restarts"] == 0
    assert "Traceback" not in front.log()
    return sorted(times)


def check_time(times: list[float]) -> None:
    """Of nine in ten: the others may have come at a moment when something else computed."""
    assert times[int(len(times) * 0.9)] < 0.1


def test_five_hundred_broken_requests(shared_front: FrontProcess) -> None:
    check_time(fuzz(shared_front, 500))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_broken_requests_and_no_memory_trend(shared_front: FrontProcess) -> None:
    fuzz(shared_front, 1000)
    process = psutil.Process(shared_front.process.pid)
    before = process.memory_info().rss
    check_time(fuzz(shared_front, 10_000))
    assert process.memory_info().rss - before < 8 << 20
