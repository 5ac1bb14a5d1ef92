"""Sessions and side requests: the rules of ftengine.api.sessions, on what the real agents were recorded to send."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from starlette.datastructures import Headers

from ftengine.api.anthropic.request import MessagesRequest
from ftengine.api.anthropic.request import conversation as of_messages
from ftengine.api.body import decode
from ftengine.api.chat.request import ChatRequest
from ftengine.api.chat.request import conversation as of_chat
from ftengine.api.responses.request import ResponsesRequest, input_items
from ftengine.api.responses.request import conversation as of_responses
from ftengine.api.sessions import NOBODY, SESSIONS, Caller, Sessions, Shape, claude_caller, openai_caller
from ftengine.api.settings import Limits
from ftengine.api.translate import Notes
from ftengine.conversation import Conversation, Message, Text, ToolSpec
from tests.traces.recordings import Recording, recordings

LIMITS = Limits()
TOOLS = (ToolSpec("read"),)
AGENT = Caller("k", agent=True)


def asked(recording: Recording) -> tuple[Caller, Conversation]:
    """As the routes read it."""
    headers, raw = Headers(recording.headers), json.dumps(recording.body).encode()
    if recording.route == "/v1/messages":
        messages = decode(raw, MessagesRequest, LIMITS)
        return claude_caller(headers, messages.metadata, messages.system), of_messages(messages, LIMITS, Notes())
    if recording.route == "/v1/responses":
        body = decode(raw, ResponsesRequest, LIMITS)
        source, _ = of_responses(body, input_items(body), LIMITS, Notes())
        return openai_caller(headers, body.prompt_cache_key, body.user), source
    chat = decode(raw, ChatRequest, LIMITS)
    return openai_caller(headers, chat.prompt_cache_key, chat.user), of_chat(chat, LIMITS, Notes())


@pytest.fixture(scope="module")
def scenarios() -> dict[str, list[Recording]]:
    found: dict[str, list[Recording]] = defaultdict(list)
    for recording in recordings():
        if recording.body is not None:
            found[recording.name.rpartition("/")[0]].append(recording)
    if not found:
        pytest.skip("no recordings beside the repository")
    return found


def placed(steps: list[Recording], sessions: Sessions) -> list[tuple[str, bool]]:
    return [sessions.place(caller, Shape.of(source)) for caller, source in map(asked, steps)]


def test_each_recorded_session_has_one_key_and_no_other_has_it(scenarios: dict[str, list[Recording]]) -> None:
    sessions, owners = Sessions(), defaultdict(set)
    for name, steps in scenarios.items():
        keys = {key for key, _ in placed(steps, sessions)}
        assert len(keys) == 1, name
        # Two runs of one agent may continue one conversation: Claude's -c, Codex' resume.
        owners[keys.pop()].add(name.split(".")[0])
    no_key = owners.pop("")
    assert {name.split("/")[0] for name in no_key} == {"openclaw"}
    assert all(len(names) == 1 for names in owners.values()), owners


def test_side_requests_of_the_recordings(scenarios: dict[str, list[Recording]]) -> None:
    """All requests without tools (titles, and the compactions of Codex and OpenCode) and Claude's compaction."""
    sessions = Sessions()
    expected = {
        recording.name
        for steps in scenarios.values()
        for recording in steps
        if not (recording.body or {}).get("tools")
        or "CRITICAL: Respond with TEXT ONLY" in json.dumps((recording.body or {}).get("messages", [None])[-1])
    }
    found = {
        recording.name
        for steps in scenarios.values()
        for recording, (_, side) in zip(steps, placed(steps, sessions), strict=True)
        if side
    }
    assert found == expected
    for needed in (
        "opencode/tools/001",
        "opencode/long.compact/009",
        "codex/long.compact/011",
        "claude/long.compact/007",
    ):
        assert needed in found


def test_the_server_restarts_between_any_two_requests(scenarios: dict[str, list[Recording]]) -> None:
    """Nothing known of the session: no main request becomes a side request."""
    wrong = [
        recording.name
        for steps in scenarios.values()
        for recording in steps
        if (recording.body or {}).get("tools")
        and "CRITICAL: Respond" not in json.dumps(recording.body)
        and placed([recording], Sessions())[0][1]
    ]
    assert wrong == []


def talk(system: str, *turns: str, tools: bool = True) -> Shape:
    messages = [Message("system", (Text(system),))]
    messages += [Message("assistant" if at % 2 else "user", (Text(turn),)) for at, turn in enumerate(turns)]
    return Shape.of(Conversation(tuple(messages), TOOLS if tools else ()))


def sides(*shapes: Shape, caller: Caller = AGENT) -> list[bool]:
    sessions = Sessions()
    return [sessions.place(caller, shape)[1] for shape in shapes]


def test_a_sub_agent_that_shares_the_key() -> None:
    main, more = talk("main", "task"), talk("main", "task", "answer", "next")
    sub, later = talk("sub", "part"), talk("sub", "part", "found", "go on")
    assert sides(main, sub, later, more, talk("other", "part")) == [False, True, True, False, True]


def test_a_changed_system_prompt_or_a_new_opening_stays_the_main_conversation() -> None:
    assert sides(talk("a", "task"), talk("b", "task", "x", "y"), talk("b", "compacted"), talk("a", "else")) == [
        False,
        False,
        False,
        True,
    ]


def test_a_first_request_again_with_another_system_prompt_is_the_main_conversation() -> None:
    """Its opening is the same, as when the agent's date has changed meanwhile. Without an opening nothing tells."""
    assert sides(talk("a", "task"), talk("b", "task"), talk("c", "task")) == [False, False, False]
    assert sides(talk("a"), talk("b"), talk("a")) == [False, True, False]


def test_after_a_restart_in_a_sub_agents_work_the_older_conversation_is_the_main_one() -> None:
    sub, main = talk("sub", "part", "x", "y"), talk("main", "task", "x", "y")
    assert sides(sub, main, sub, main) == [False, False, False, False]  # doubt: both keep their place
    assert sides(talk("sub", "part"), main, talk("sub", "new part"), main) == [False, False, True, False]


def test_no_tools_beside_tools_whatever_the_key() -> None:
    main, title = talk("main", "task"), talk("titles", "task", tools=False)
    assert sides(main, title) == [False, True]
    assert sides(title, main) == [True, False]  # an agent's title comes first
    assert sides(title, talk("titles", "task", "x", "y", tools=False), caller=Caller("k")) == [False, False]
    assert sides(main, title, caller=NOBODY) == [False, False]  # whose is it?
    assert sides(main, title, caller=Caller("k")) == [False, True]


def test_a_key_that_is_no_agents_may_be_shared_by_different_prompts() -> None:
    assert sides(talk("one", "task"), talk("other", "part"), talk("one", "task"), caller=Caller("k")) == [False] * 3


@pytest.mark.parametrize(
    ("headers", "system"),
    [
        ({"X-Claude-Code-Agent-Id": "a1"}, None),
        ({"x-claude-code-request-class": "compaction"}, None),
        ({}, [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cc_is_subagent=true;"}]),
        ({}, "x-anthropic-billing-header: cc_is_subagent=true"),
        ({}, [{"text": "You are an agent."}, {"text": "x-anthropic-billing-header: a; cc_is_subagent=true; b"}]),
    ],
)
def test_claude_says_that_it_is_a_sub_agent(headers: dict[str, str], system: Any) -> None:
    caller = claude_caller(Headers(headers), {"user_id": '{"session_id": "s"}'}, system)
    assert Sessions().place(caller, talk("main", "task"))[1]


@pytest.mark.parametrize(
    "headers",
    [
        {"x-parent-session-id": "ses_parent"},
        {"x-openai-subagent": "review"},
        {"x-codex-parent-thread-id": "t"},
        {"x-codex-turn-metadata": '{"request_kind": "compaction", "thread_source": "user"}'},
        {"x-codex-turn-metadata": '{"request_kind": "turn", "thread_source": "thread_title"}'},
    ],
)
def test_codex_and_opencode_say_that_they_are_beside(headers: dict[str, str]) -> None:
    assert Sessions().place(openai_caller(Headers(headers), "thread"), talk("main", "task"))[1]


def test_where_keys_are_looked_for() -> None:
    """One key is one session, wherever the client puts it; white space around it counts for nothing."""
    key = openai_caller(Headers(), "abc-1").key
    assert len(key) == 16
    assert int(key, 16) >= 0
    same = [
        claude_caller(Headers({"X-Claude-Code-Session-Id": " abc-1 "}), {"user_id": '{"session_id": "other"}'}, None),
        claude_caller(Headers(), {"user_id": '{"device_id": "d", "session_id": "abc-1"}'}, None),
        claude_caller(Headers({"x-session-id": "abc-1"}), None, None),
        openai_caller(Headers({"session_id": "abc-1"})),
        openai_caller(Headers({"x-session-affinity": "abc-1"})),
        openai_caller(Headers({"thread-id": "x"}), "abc-1"),
    ]
    assert {caller.key for caller in same} == {key}
    old = "user_0af3_account__session_0c03dca3-626b-4ae7-9cef-0917f8cc178d"
    assert (
        claude_caller(Headers(), {"user_id": old}, None).key
        == claude_caller(Headers({"X-Claude-Code-Session-Id": "0c03dca3-626b-4ae7-9cef-0917f8cc178d"}), None, None).key
    )


def test_a_person_may_have_several_conversations() -> None:
    sessions, caller = Sessions(), openai_caller(Headers(), None, "alice")
    first, _ = sessions.place(caller, talk("main", "task"))
    again, side = sessions.place(caller, talk("main", "task", "x", "y"))
    other, beside = sessions.place(caller, talk("main", "another task"))
    assert first == again != other
    assert (side, beside) == (False, False)


@pytest.mark.parametrize("odd", [None, 7, 1.5, True, [], ["a"], {}, {"user_id": 3}, "", "   ", "\ud800", "x" * 100_000])
def test_keys_of_any_type_do_no_harm(odd: Any) -> None:
    callers = [
        openai_caller(Headers(), odd, odd),
        claude_caller(Headers(), odd, odd),
        claude_caller(Headers(), {"user_id": odd}, [odd]),
        claude_caller(Headers(), {"user_id": "[" * 4000}, [{"text": odd}]),
    ]
    assert all(len(caller.key) in (0, 16) for caller in callers)
    openai_caller(Headers({"x-codex-turn-metadata": '{"request_kind": [], "thread_source": {}}'}))
    openai_caller(Headers({"x-codex-turn-metadata": "[" * 5000}))


def test_bounded() -> None:
    sessions = Sessions()
    for number in range(3 * SESSIONS):
        sessions.place(Caller(f"{number}", agent=True), talk("main", "task"))
    for number in range(100):
        sessions.place(Caller("0", agent=True), talk(f"sub {number}", "part"))
    assert len(sessions._known) == SESSIONS
    assert len(sessions._known["0"].sides) <= 16
