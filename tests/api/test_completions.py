"""/v1/completions: text in, text out, against OpenAI's published form."""

from __future__ import annotations

from typing import Any

import httpx

from tests.api.talk import post, script, stream

PATH = "/v1/completions"


def ask(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, **fields}


def test_text_and_token_prompts(client: httpx.Client) -> None:
    text = script(say="<think>raw</think>")
    for prompt in (text, list(text.encode())):
        body = post(client, PATH, ask(prompt, max_tokens=100))
        assert body["object"] == "text_completion"
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("<think>raw</think>", "stop")
        assert body["usage"]["prompt_tokens"] == len(text)


def test_the_apis_own_default_length(client: httpx.Client) -> None:
    choice = post(client, PATH, ask(script(say="x" * 50)))["choices"][0]
    assert (len(choice["text"]), choice["finish_reason"]) == (16, "length")


def test_several_prompts_times_n(client: httpx.Client) -> None:
    prompts = [script(say="a"), script(say="b")]
    body = post(client, PATH, ask(prompts, n=2))
    assert [choice["text"] for choice in body["choices"]] == ["a", "a", "b", "b"]
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    frames = stream(client, PATH, ask(prompts, stream_options={"include_usage": True}))
    assert frames[-1].data == "[DONE]"
    texts = {0: "", 1: ""}
    for frame in frames[:-2]:
        for choice in frame.data["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "a", 1: "b"}
    assert frames[-2].data["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_echo_and_logprobs(client: httpx.Client) -> None:
    text = script(say="hey")
    choice = post(client, PATH, ask(list(text.encode()), echo=True, logprobs=1))["choices"][0]
    assert choice["text"] == text + "hey"
    assert choice["logprobs"]["tokens"] == ["h", "e", "y"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert choice["logprobs"]["text_offset"] == [len(text), len(text) + 1, len(text) + 2]
    frames = stream(client, PATH, ask(text, echo=True, logprobs=1))
    entries = [choice for frame in frames[:-1] for choice in frame.data["choices"]]
    assert "".join(entry["text"] for entry in entries) == text + "hey"
    assert [t for entry in entries if entry["logprobs"] for t in entry["logprobs"]["tokens"]] == ["h", "e", "y"]


def test_stop(client: httpx.Client) -> None:
    choice = post(client, PATH, ask(script(say="one\ntwo"), stop=["\n"]))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one", "stop")
