"""What agents send, as turns: order, roles and content in one form."""

from __future__ import annotations

from typing import Any

import pytest

from ftengine.conversation import Conversation, Image, Text, ToolReference, ToolResult, ToolSpec
from ftengine.dialect.prompt.adapt import adapt
from ftengine.dialect.prompt.capabilities import Capabilities
from ftengine.dialect.prompt.turns import NO_RESULT, SILENT_FAILURE, Turn, order_turns
from ftengine.dialect.tools import Toolbox
from tests.dialect.talk import READ, STATUS, call, result, say, talk, think

ABLE = Capabilities(
    system=True,
    tools=True,
    tool_turns=True,
    parallel_calls=True,
    repeated_users=True,
    reasoning_key="reasoning_content",
    text_beside_reasoning=True,
)


def turns(conversation: Conversation) -> list[Turn]:
    return order_turns(conversation, Toolbox(conversation.tools))


def short(found: list[Turn]) -> list[tuple[str, str]]:
    """Role and text; an assistant's calls as `name(arguments)`."""
    return [(turn.role, turn.text + "".join(f" {one.name}({one.arguments})" for one in turn.calls)) for turn in found]


def test_leading_instructions_merge_and_later_ones_stand_where_they_came() -> None:
    found = turns(
        talk(
            say("system", "A"),
            say("developer", "B", "C"),
            say("user", "hi"),
            say("system", "D"),
            say("assistant", "ok"),
            say("developer", "E"),
            say("user", "go"),
        )
    )
    assert short(found) == [
        ("system", "A\n\nB\nC"),
        ("user", "hi\n\n<system_message>\nD\n</system_message>"),
        ("assistant", "ok"),
        ("user", "<system_message>\nE\n</system_message>"),
        ("user", "go"),
    ]


@pytest.mark.parametrize(
    "billing", ["x-anthropic-billing-header: cc_version=2; cch=1a;", "x-anthropic-billing-header: z"]
)
def test_version_line_of_claude_code_is_left_out(billing: str) -> None:
    assert short(turns(talk(say("system", billing, "You help."), say("user", "hi")))) == [
        ("system", "You help."),
        ("user", "hi"),
    ]
    assert short(turns(talk(say("system", f"{billing}\nYou help."), say("user", "hi"))))[0] == ("system", "You help.")


def test_results_stand_in_the_order_of_their_calls_and_before_what_else_came() -> None:
    found = turns(
        talk(
            say("user", "do"),
            say("assistant", "Both.", call("call_1", "a", {}), call("call_2", "b", {})),
            result("call2", "two"),
            say("system", "note"),
            result("CALL_1".lower().replace("_", "-"), "one"),
            say("user", "next"),
        )
    )
    assert short(found) == [
        ("user", "do"),
        ("assistant", "Both. a({}) b({})"),
        ("tool", "one"),
        ("tool", "two"),
        ("user", "<system_message>\nnote\n</system_message>"),
        ("user", "next"),
    ]
    assert [turn.answers.name for turn in found if turn.answers] == ["a", "b"]


def test_results_and_text_of_one_user_message_are_parted() -> None:
    found = turns(
        talk(say("assistant", call("1", "a", {})), say("user", "see", ToolResult("1", (Text("r"),)), "what now?"))
    )
    assert short(found) == [("assistant", " a({})"), ("tool", "r"), ("user", "see\nwhat now?")]


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("<system-reminder>\nOne.\n</system-reminder>", True),
        (" <system-reminder>One.</system-reminder>\n<system-reminder>Two.</system-reminder>\n", True),
        ("<system-reminder>One.</system-reminder> And now?", False),
        ("Now <system-reminder>One.</system-reminder>", False),
        ("<system-reminder>One.</system-reminder>" * 30 + "?", False),
        ("<system-reminder>One.", False),
    ],
)
def test_reminders_beside_results_ask_nothing(text: str, joined: bool) -> None:
    """As a user's turn they would make a template show the rounds before as answered questions."""
    loop = [say("user", "Go."), say("assistant", call("1", "status", {})), result("1", "fine")]
    found = short(turns(talk(*loop, say("user", text))))
    assert found[2:] == ([("tool", f"fine\n\n{text}")] if joined else [("tool", "fine"), ("user", text)])
    assert short(turns(talk(say("user", text)))) == [("user", text)]


def test_calls_without_result_and_results_without_call() -> None:
    found = turns(
        talk(
            say("user", "do"),
            say("assistant", call("1", "a", {}), call("2", "b", {})),
            result("2", "two"),
            result("9", "lost"),
            say("assistant", call("3", "c", {})),
        )
    )
    assert [text for role, text in short(found) if role == "tool"] == [NO_RESULT, "two"]
    assert found[4] == Turn("user", "Result of a tool call that is not part of this conversation:\nlost")
    assert short(found)[-1] == ("assistant", " c({})")


def test_ids_that_repeat_in_later_rounds_stay_in_their_round() -> None:
    rounds = [say("user", "do")]
    for text in ("first", "second"):
        rounds += [say("assistant", call("call_1", "a", {})), result("call_1", text)]
    assert [text for role, text in short(turns(talk(*rounds))) if role == "tool"] == ["first", "second"]


def test_results_without_an_id_answer_in_order() -> None:
    calls = [call(str(number), name, {}) for number, name in enumerate("abc")]
    found = turns(talk(say("assistant", *calls), result("1", "two"), result("", "one"), result("", "three")))
    assert [text for role, text in short(found) if role == "tool"] == ["one", "two", "three"]


@pytest.mark.timeout(120)  # matched pair by pair, these take many minutes
def test_very_many_calls_and_results_in_the_opposite_order() -> None:
    numbers = range(30_000)
    calls = (call(f"call_{number}", "a", {}) for number in numbers)
    found = turns(talk(say("assistant", *calls), *(result(f"call_{n}", str(n)) for n in reversed(numbers))))
    assert [text for role, text in short(found) if role == "tool"] == [str(number) for number in numbers]


def test_pieces_of_one_assistant_turn_merge() -> None:
    found = turns(
        talk(
            say("user", "do"),
            say("assistant", think("why")),
            say("assistant", "So:"),
            say("assistant", call("1", "a", {})),
            say("assistant", call("2", "b", {})),
            result("1", "x"),
            result("2", "y"),
        )
    )
    assert short(found) == [("user", "do"), ("assistant", "So: a({}) b({})"), ("tool", "x"), ("tool", "y")]
    assert found[1].reasoning == "why"


def test_reasoning_that_a_client_left_in_the_text_is_reasoning() -> None:
    found = turns(talk(say("user", "q"), say("assistant", "<think>\nhm\n</think>\n\nSo."), say("user", "r")))
    assert (found[1].reasoning, found[1].text) == ("hm", "So.")


def test_nothing_empty_is_rendered() -> None:
    found = turns(talk(say("system", ""), say("user", ""), say("assistant"), say("user", " \n"), say("user", "q")))
    assert short(found) == [("user", "q")]


def test_what_a_text_model_cannot_see_is_named() -> None:
    found = turns(talk(say("user", "look", Image("screenshot.png"), "there")))
    assert found[0].text == "look\n[screenshot.png left out: this model reads text only]\nthere"


def test_silent_failure_says_so() -> None:
    found = turns(talk(say("assistant", call("1", "a", {})), say("tool", ToolResult("1", (), is_error=True))))
    assert found[1].text == SILENT_FAILURE


def test_deferred_tool_is_defined_where_it_is_referred_to() -> None:
    late = ToolSpec("late", "Comes late.", {"type": "object", "properties": {"x": {"type": "string"}}}, deferred=True)
    names = ("late", "read_file", "gone")
    reference = say("tool", ToolResult("1", tuple(ToolReference(name) for name in names)))
    conversation = talk(say("assistant", call("1", "find", {})), reference, tools=[READ, late])
    toolbox = Toolbox(conversation.tools)
    assert [tool["function"]["name"] for tool in toolbox.listed()] == ["read_file"]
    text = order_turns(conversation, toolbox)[1].text
    assert '"name": "late", "description": "Comes late.", "parameters": {"type": "object"' in text
    assert text.count('"parameters"') == 1
    assert "The tool gone is not available." in text
    assert toolbox.find("late") is late


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"path": "a"}', {"path": "a"}),
        ({"path": "a"}, {"path": "a"}),
        ("", {}),
        ("null", {"path": "null"}),
        ('"{\\"path\\": \\"a\\"}"', {"path": "a"}),
        ('{"path": "a\nb"}', {"path": "a\nb"}),
        ('{"path": "cut of', {"path": "cut of"}),
        ('{"path": "say "hi""}', {"path": 'say "hi"'}),
        ("no JSON {", {"path": "no JSON {"}),
        ("[1]", {"path": "[1]"}),
        ("{", {"path": "{"}),
        ({"__unparsedToolInput": {"raw": '{"path": "cu', "len": 12}}, {"path": "cu"}),
        ({"__unparsedToolInput": 'oops "'}, {"path": 'oops "'}),
        ({"__unparsedToolInput": {"len": 3}}, {"len": 3}),
        ('{"a":' * 5000 + "1" + "}" * 5000, None),
        ("[" * 100_000, None),
    ],
)
def test_arguments_are_always_an_object(arguments: Any, expected: dict[str, Any] | None) -> None:
    found = turns(talk(say("assistant", call("1", "read_file", arguments)), tools=[READ]))[0].calls[0].arguments
    assert isinstance(found, dict)
    if expected is not None:
        assert found == expected


def test_what_a_template_lacks_becomes_text() -> None:
    conversation = talk(
        say("system", "S"),
        say("user", "do"),
        say("assistant", "Both.", call("1", "a", {"x": 1}), call("2", "b", {})),
        result("1", "one"),
        result("2", "two"),
        tools=[STATUS],
    )
    able = {name: getattr(ABLE, name) for name in ABLE.__dataclass_fields__}
    nothing = Capabilities(**{**able, "system": False, "tool_turns": False, "repeated_users": False})
    assert short(adapt(turns(conversation), nothing)) == [
        ("user", "S\n\ndo"),
        ("assistant", 'Both.\nCall of a: {"x": 1}\nCall of b: {}'),
        ("user", "Result of a:\none\n\nResult of b:\ntwo"),
    ]
    one_by_one = Capabilities(**{**able, "parallel_calls": False})
    assert short(adapt(turns(conversation), one_by_one)) == [
        ("system", "S"),
        ("user", "do"),
        ("assistant", "Both. a({'x': 1})"),
        ("tool", "one"),
        ("assistant", " b({})"),
        ("tool", "two"),
    ]
    assert adapt(turns(conversation), ABLE) == turns(conversation)
