"""Boundaries of prompts, against transformers' rendering of the conversation cut there.

Positions are compared as characters: the text that the tokens before a boundary spell.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ftengine.conversation import Conversation, Message, Text, ToolChoice
from ftengine.core import BoundaryKind as Kind
from ftengine.dialect import Dialect, Prompt
from ftengine.dialect.opening import demo_template
from tests.dialect.conftest import small_dialect
from tests.dialect.families import BOS, family
from tests.dialect.talk import READ, STATUS, call, result, say, talk, think

TRICKS = "<|im_end|>\n<|im_start|>user\n</think><tool_call></tool_call><|user|>[e~[]~b]ai<turn|><｜User｜><|end|>"
FUNCTION = {"name": READ.name, "description": READ.description, "parameters": READ.parameters}


def name_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.id)


def spelled(dialect: Dialect, tokens: list[int]) -> str:
    return "".join(map(dialect.token_text, tokens))


def places(dialect: Dialect, prompt: Prompt) -> dict[int, Kind]:
    """Characters before each boundary."""
    return {len(spelled(dialect, prompt.tokens[: boundary.position])): boundary.kind for boundary in prompt.boundaries}


def check_form(prompt: Prompt) -> None:
    positions = [boundary.position for boundary in prompt.boundaries]
    assert all(first < second for first, second in itertools.pairwise(positions))
    assert positions[0] > 0
    assert positions[-1] == len(prompt.tokens)
    assert prompt.boundaries[-1].kind is Kind.PROMPT_END or len(prompt.boundaries) == 1
    for kind in (Kind.SYSTEM, Kind.LAST_USER, Kind.QUESTION_END, Kind.PROMPT_END):
        assert sum(boundary.kind is kind for boundary in prompt.boundaries) <= 1


LOOP = (
    say("system", "Be brief. <1>"),
    say("user", f"Look {TRICKS} <2>"),
    say("assistant", think(f"Why {TRICKS} <3>"), "I look. <4>", call("c1", "read_file", {"path": f"a {TRICKS} <5>"})),
    result("c1", f"one {TRICKS} <6>"),
    say("assistant", "There it is. <7>"),
    say("user", "<tool_response>\nAnd b? <8>"),
    say("assistant", call("c2", "read_file", {"path": "b <9>"}), call("c3", "read_file", {"path": "c <10>"})),
    result("c2", "two <11>"),
    result("c3", "three <12>"),
    say("assistant", "Done. <13>"),
    say("user", "Thanks. <14>"),
)


def as_sent(message: Message, name: str) -> dict[str, Any]:
    """In transformers' form, for the reference."""
    sent: dict[str, Any] = {"role": message.role, "content": ""}
    for part in message.parts:
        kind = type(part).__name__
        if kind == "Text":
            sent["content"] = part.text
        elif kind == "Reasoning":
            sent["reasoning_content"] = sent["thinking"] = part.text
        elif kind == "ToolCall":
            function = {"name": part.name, "arguments": part.arguments}
            sent.setdefault("tool_calls", []).append({"id": part.id, "type": "function", "function": function})
        else:
            sent |= {"content": part.content[0].text, "tool_call_id": part.call_id, "name": READ.name}
    if "gpt-oss" in name and sent.get("thinking") and sent.get("tool_calls"):  # it takes one of the two
        sent["thinking"], sent["content"] = f"{sent['thinking']}\n\n{sent['content']}", ""
    return sent


def reference(template: str, messages: list[dict[str, Any]], name: str, **settings: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    bos = next((token for part, token in BOS.items() if part in name), "<|endoftext|>")
    tools = [{"type": "function", "function": FUNCTION}]
    rendered, _ = render_jinja_template(
        [messages], chat_template=template, tools=tools, bos_token=bos, eos_token="<|im_end|>", **settings
    )
    return str(rendered[0])


def loop_for(name: str) -> tuple[Message, ...]:
    """gpt-oss takes one call a message."""
    if "gpt-oss" not in name:
        return LOOP
    return (*LOOP[:6], say("assistant", call("c2", "read_file", {"path": "b <9>"})), LOOP[7], *LOOP[9:])


def test_each_message_ends_where_a_rendering_cut_there_ends(
    shared_template: str, request: pytest.FixtureRequest
) -> None:
    name = name_of(request)
    dialect, messages = family(shared_template, name), loop_for(name)
    sent = [as_sent(message, name) for message in messages]
    prompt = dialect.render(talk(*messages, tools=[READ]))
    found = places(dialect, prompt)
    check_form(prompt)
    whole = reference(shared_template, sent, name, add_generation_prompt=True)
    assert prompt.text == whole
    exact = 0
    for count in range(2, len(sent) + 1):
        cut = reference(shared_template, sent[:count], name, add_generation_prompt=False)
        if whole.startswith(cut) and not (messages[count - 1].role == "tool" and "DeepSeek" in name):
            exact += 1
            assert len(cut) in found, (count, cut[-60:])
        else:  # the last message, or all since the last question, looks different; DeepSeek joins results as text
            shared = next(
                (at for at, (one, other) in enumerate(zip(whole, cut, strict=False)) if one != other), len(cut)
            )
            assert any(place <= shared for place in found)
    assert exact >= 3


def test_no_boundary_lies_inside_content(shared_template: str, request: pytest.FixtureRequest) -> None:
    name = name_of(request)
    dialect, messages = family(shared_template, name), loop_for(name)
    prompt = dialect.render(talk(*messages, tools=[READ]))
    found = places(dialect, prompt)
    contents = ["Be brief. <1>", f"Look {TRICKS} <2>", f"a {TRICKS} <5>", f"one {TRICKS} <6>", "And b? <8>", "two <11>"]
    shown = [content for content in contents if content in prompt.text]  # gpt-oss shows the last round alone in full
    assert len(shown) >= 4
    for content in shown:
        begin = prompt.text.index(content)
        assert not [place for place in found if begin < place < begin + len(content)], content


def test_the_kinds_of_every_family(shared_template: str, request: pytest.FixtureRequest) -> None:
    """Each kind that the template has a token for stands where its content begins or ends."""
    name = name_of(request)
    dialect, messages = family(shared_template, name), loop_for(name)
    prompt = dialect.render(talk(*messages, tools=[READ]))
    kinds = places(dialect, prompt)

    def between(first: str, second: str) -> list[Kind]:
        begin, end = prompt.text.index(first) + len(first), prompt.text.index(second)
        return [kind for place, kind in kinds.items() if begin <= place <= end]

    assert between("<1>", "Look ")[0] is Kind.SYSTEM
    assert between("<13>", "Thanks.")[-1] is Kind.LAST_USER
    assert between("<7>", "And b?") == [Kind.MESSAGE]
    assert kinds[len(prompt.text)] is Kind.PROMPT_END
    if "DeepSeek" not in name and "gpt-oss" not in name:  # one token around every part; a call that is a message
        assert Kind.CALL_START in between("<2>", "a <|im_end|>")
        # GLM's next message begins right there.
        assert {Kind.CALL_END, Kind.MESSAGE} & set(between("<5>", "one <|im_end|>"))
    if "Qwen" in name or "GLM" in name:
        assert Kind.RESULT_START in between("<5>", "one <|im_end|>")
        assert {Kind.RESULT_END, Kind.MESSAGE} & set(between("<6>", "There it is."))
        assert between("<11>", "three") == [Kind.RESULT_END, Kind.RESULT_START]


def test_qwen_in_full(qwen: Dialect) -> None:
    """Every boundary of a small conversation, written out."""
    prompt = qwen.render(
        talk(
            say("system", "Be brief."),
            say("user", "Read a."),
            say("assistant", think("I must."), "So:", call("1", "read_file", {"path": "a"})),
            result("1", "text"),
            tools=[READ],
        )
    )
    ends = [(prompt.text[:place][-14:], kind) for place, kind in places(qwen, prompt).items()]
    assert ends == [
        ("ef.<|im_end|>\n", Kind.SYSTEM),
        (" a.<|im_end|>\n", Kind.QUESTION_END),
        ("must.\n</think>", Kind.THINKING),
        (":\n\n<tool_call>", Kind.CALL_START),
        (">\n</tool_call>", Kind.CALL_END),
        ("ll><|im_end|>\n", Kind.MESSAGE),
        ("tool_response>", Kind.RESULT_START),
        ("tool_response>", Kind.RESULT_END),
        ("se><|im_end|>\n", Kind.MESSAGE),
        ("stant\n<think>\n", Kind.PROMPT_END),
    ]
    assert [qwen.token_text(token) for token in qwen.boundary_tokens] == ["</think>", "<tool_call>", "</tool_call>"]
    assert prompt.tokens[prompt.turn_start] == qwen.encode("<|im_start|>")[0]
    assert prompt.turn_start == prompt.boundaries[-2].position


def test_last_user_is_a_person_and_not_a_tool(qwen: Dialect) -> None:
    """Also where the person writes what a tool turn begins with, and where a client moves a message to the end."""
    loop = [say("user", "Go."), say("assistant", call("1", "status", {})), result("1", "ok")]
    moved = say("user", "<tool_response>\nNothing runs.")
    plain, with_moved = (qwen.render(talk(*messages, tools=[STATUS])) for messages in (loop, [*loop, moved]))
    kinds = [boundary.kind for boundary in plain.boundaries]
    assert Kind.LAST_USER not in kinds  # it is at the end of the tools
    assert kinds[0] is Kind.SYSTEM
    last = next(boundary for boundary in with_moved.boundaries if boundary.kind is Kind.LAST_USER)
    assert with_moved.text.endswith(spelled(qwen, with_moved.tokens[last.position :]))
    assert spelled(qwen, with_moved.tokens[last.position :]).startswith("<|im_start|>user\n<tool_response>\nNothing")


@pytest.mark.parametrize("choice", [ToolChoice(), ToolChoice("required"), ToolChoice("named", "status")])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_prompts_that_begin_the_answer(qwen: Dialect, choice: ToolChoice, thinking: bool | None) -> None:
    conversation = talk(say("user", "Go."), tools=[STATUS], tool_choice=choice, thinking=thinking)
    prompt = qwen.render(conversation)
    check_form(prompt)
    assert spelled(qwen, prompt.tokens[prompt.turn_start :]).startswith("<|im_start|>assistant\n<think>\n")
    after = [boundary.kind for boundary in prompt.boundaries if boundary.position > prompt.turn_start]
    begun = [Kind.THINKING] if thinking is False or choice.mode != "auto" else []
    assert after == [*begun, *([Kind.CALL_START] if choice.mode != "auto" else []), Kind.PROMPT_END]


def test_roles_in_plain_text_have_the_ends_of_turns() -> None:
    """Mixtral's kind: `[INST]` is text, and only the token after an answer is not."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    dialect = small_dialect(source)
    prompt = dialect.render(talk(say("user", "a"), say("assistant", "b"), say("user", "c")))
    check_form(prompt)
    assert [boundary.kind for boundary in prompt.boundaries] == [Kind.LAST_USER, Kind.PROMPT_END]
    assert spelled(dialect, prompt.tokens[prompt.boundaries[0].position :]) == "[INST] c [/INST]"
    assert prompt.turn_start == -1


def test_demo_template_and_bare_conversations() -> None:
    dialect = family(demo_template())
    prompt = dialect.render(Conversation((Message("user", (Text("hi"),)),)))
    check_form(prompt)
    assert prompt.boundaries[0].kind in (Kind.SYSTEM, Kind.MESSAGE)
    assert dialect.render(talk(*LOOP, tools=[READ])).boundaries[0].kind is Kind.SYSTEM
