"""Agents append: the prompt of one request, up to its generation prompt, begins the next request's prompt."""

from __future__ import annotations

import itertools

import pytest

from ftengine.conversation import Message, Text, ToolReference, ToolResult, ToolSpec
from ftengine.dialect import Dialect
from ftengine.dialect.opening import demo_template
from tests.dialect.conftest import small_dialect
from tests.dialect.talk import READ, STATUS, call, result, say, talk, think

ANSWERS = ("<|im_start|>assistant", "<|assistant|>", "]~b]ai", "<｜Assistant｜>", "<|turn>model", "<|start|>assistant")


def loop(rounds: int, reasoning: bool) -> list[Message]:
    """One tool loop as Claude Code and Codex send it: instructions, a system message in place, parallel calls."""
    messages = [say("system", "You help."), say("developer", "Carefully."), say("user", "Do it.")]
    messages.append(say("system", "Environment: Linux."))
    for number in range(rounds):
        thought = [think(f"Step {number}.")] if reasoning else []
        calls = [call(f"call_{number}{letter}", "read_file", {"path": letter}) for letter in "ab"]
        messages.append(say("assistant", *thought, *([f"Round {number}."] if number % 2 else []), *calls))
        messages += [result(f"call{number}b", "second"), result(f"call{number}a", "first")]
    return messages


def before_answer(dialect: Dialect, messages: list[Message]) -> str:
    text = dialect.render(talk(*messages, tools=[READ])).text
    return text[: max(text.rfind(answer) for answer in ANSWERS)]


def appends(dialect: Dialect, earlier: list[Message], later: list[Message]) -> bool:
    return dialect.render(talk(*later, tools=[READ])).text.startswith(before_answer(dialect, earlier))


def check_appended(dialect: Dialect, requests: list[list[Message]]) -> None:
    for earlier, later in itertools.pairwise(requests):
        assert appends(dialect, earlier, later)


@pytest.mark.parametrize("reasoning", [True, False])
def test_tool_loop_appends(shared_template: str, reasoning: bool) -> None:
    check_appended(small_dialect(shared_template), [loop(rounds, reasoning) for rounds in range(4)])


def test_next_question_appends_without_reasoning(shared_template: str, request: pytest.FixtureRequest) -> None:
    """With reasoning, most templates take earlier turns' reasoning out when the user asks again: theirs to decide.

    Qwen3.5 and gpt-oss also change what earlier turns without reasoning look like.
    """
    done = [*loop(2, reasoning=False), say("assistant", "Done."), say("user", "And now?")]
    changes = request.node.callspec.id in ("Qwen3.5-4B", "openai-gpt-oss-120b")
    assert appends(small_dialect(shared_template), loop(2, reasoning=False), done) is not changes


def test_demo_template_appends() -> None:
    check_appended(small_dialect(demo_template()), [loop(rounds, False) for rounds in range(4)])


def test_tools_that_become_known_leave_the_beginning_alone() -> None:
    """Claude's tool search: later requests list the found tool among the others, marked as deferred."""
    late = ToolSpec("fetch", "Fetches.", {"properties": {"url": {"type": "string"}}}, deferred=True)
    dialect = small_dialect(demo_template())
    first = [say("user", "Do it."), say("assistant", call("1", "find_tools", {"query": "fetch"}))]
    second = [*first, say("tool", ToolResult("1", (ToolReference("fetch"), Text("found")))), say("assistant", "ok")]
    before = dialect.render(talk(*first, tools=[READ, STATUS])).text
    after = dialect.render(talk(*second, tools=[late, READ, STATUS])).text
    assert after.startswith(before.removesuffix("<|im_start|>assistant\n"))
    assert '"name": "fetch"' in after
