"""/v1/responses against OpenAI's published events, in the order that Codex was seen to accept."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import httpx

from tests.api.sse_reader import Frame
from tests.api.talk import ANSWER, CALL, TOOL, post, script, stream

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "read", "description": "reads", "strict": False, "parameters": TOOL}]


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"input": text, **fields}


def events(frames: list[Frame]) -> list[str]:
    """Names, each equal to its data's type, numbered from 0 without a gap."""
    assert [frame.data["sequence_number"] for frame in frames] == list(range(len(frames)))
    assert all(frame.event == frame.data["type"] for frame in frames)
    return [frame.event.removeprefix("response.") for frame in frames]


def test_stream_of_reasoning_text_and_function_call(client: httpx.Client) -> None:
    frames = stream(client, PATH, ask(script(say=ANSWER + CALL, cached=5), tools=TOOLS))
    names = events(frames)
    order = [name for name, _ in groupby(names)]
    assert order == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    items = [frame.data["item"] for frame in frames if frame.event == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert items[1]["content"][0]["text"] == "Héllo 😀"
    assert (items[2]["name"], items[2]["arguments"]) == ("read", '{"path": "ä.txt"}')
    assert items[2]["call_id"].startswith("call_")
    added = [frame.data for frame in frames if frame.event == "response.output_item.added"]
    assert [data["output_index"] for data in added] == [0, 1, 2]
    assert [data["item"]["id"] for data in added] == [item["id"] for item in items]
    text = "".join(f.data["delta"] for f in frames if f.event == "response.output_text.delta")
    assert text == "Héllo 😀"

    final = frames[-1].data["response"]
    assert final["status"] == "completed"
    assert final["output"] == items
    usage = final["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 5}
    assert usage["output_tokens"] == len((ANSWER + CALL).encode()) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert {frame.data["response"]["id"] for frame in frames if "response" in frame.data} == {final["id"]}


def test_whole_answer_has_the_same_items(client: httpx.Client) -> None:
    body = post(client, PATH, ask(script(say=ANSWER + CALL), tools=TOOLS))
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]


def test_incomplete_when_cut(client: httpx.Client) -> None:
    frames = stream(client, PATH, ask(script(say="abcdef"), max_output_tokens=4))
    final = frames[-1]
    assert final.event == "response.incomplete"
    assert final.data["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final.data["response"]["output"][0]["status"] == "incomplete"
    assert post(client, PATH, ask(script(say="abcdef"), max_output_tokens=4))["status"] == "incomplete"


def test_freeform_tool_gets_its_text(client: httpx.Client) -> None:
    tools = [{"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "definition": "start: x"}}]
    say = '<call>{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+é"}}</call>'
    frames = stream(client, PATH, ask(script(say=say), tools=tools))
    assert events(frames)[2:6] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    item = frames[-1].data["response"]["output"][0]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n+é")


def test_namespaced_tool_comes_back_as_the_client_knows_it(client: httpx.Client) -> None:
    group = {"type": "namespace", "name": "agents", "description": "d", "tools": TOOLS}
    say = '<call>{"name": "agents__read", "arguments": {}}</call>'
    for body in (
        ask(script(say=say), tools=[group, {"type": "web_search", "external_web_access": False}]),
        {"input": [{"type": "additional_tools", "tools": [group]}, {"role": "user", "content": script(say=say)}]},
    ):
        item = post(client, PATH, body)["output"][0]
        assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "read")


def test_everything_codex_sends_is_accepted(client: httpx.Client) -> None:
    body = {
        "instructions": "be good",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c1", "name": "read", "namespace": "agents", "arguments": '{"a'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "o"}]},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "p", "status": "completed"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
            {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "c3", "output": {"exit_code": 0}},
            {"type": "tool_search_call", "call_id": "c4", "arguments": {"query": "x"}},
            {"type": "tool_search_output", "call_id": "c4", "tools": TOOLS},
            {"type": "web_search_call", "status": "completed"},
            {"type": "compaction", "encrypted_content": "x"},
            {"role": "user", "content": script(say="fine")},
        ],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "x", "schema": {}}},
    }
    assert post(client, PATH, body)["output"][0]["content"][0]["text"] == "fine"


def test_stored_responses_are_refused_in_words(client: httpx.Client) -> None:
    response = client.post(PATH, json=ask("x", previous_response_id="resp_1"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "previous_response_id"
    assert "not stored" in response.json()["error"]["message"]


def test_too_long_has_codex_code(client: httpx.Client) -> None:
    response = client.post(PATH, json=ask("x" * 5000, stream=True))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
