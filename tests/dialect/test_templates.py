"""Templates as strangers' programs, and what the dialect makes of their refusals."""

from __future__ import annotations

import time

import pytest

from ftengine.conversation import Conversation, ToolChoice
from ftengine.dialect.opening import demo_template, read_grammar
from ftengine.dialect.prompt.template import ChatTemplate, TemplateRefused
from ftengine.errors import BadRequest, CheckpointError
from tests.dialect.conftest import SMALL, small_dialect
from tests.dialect.talk import READ, STATUS, TOOLS, call, result, say, talk

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% set x = namespace(v='ab') %}{% for i in range(99) %}{% set x.v = x.v ~ x.v %}{% endfor %}",
        "{% set x = namespace(v='ab') %}{% for i in range(99) %}{% set x.v = x.v + x.v %}{% endfor %}",
        "{% set x = namespace(v=['a']) %}{% for i in range(99) %}{% set x.v = x.v + x.v %}{% endfor %}",
        "{% set x = namespace(v=3) %}{% for i in range(99) %}{% set x.v = x.v * x.v %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ {}.x | tojson }}",
    ],
)
def test_hostile_and_broken_templates_only_refuse(source: str) -> None:
    """No hang, no memory, no Python: an error within the time allowed."""
    begin = time.monotonic()
    with pytest.raises(TemplateRefused):
        ChatTemplate(source, {}, seconds=0.5).render([{"role": "user", "content": "x"}], tools=None)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'x' ", "{% unknown %}", "{{ x | nofilter }}"])
def test_template_that_does_not_compile_is_said(source: str) -> None:
    with pytest.raises(CheckpointError, match="the chat template cannot be read"):
        ChatTemplate(source, {})


def test_refusal_is_one_sentence_for_the_client() -> None:
    dialect = small_dialect(
        CHATML + "{% if messages | length > 3 %}{{ raise_exception('Too long, sorry.') }}{% endif %}"
    )
    with pytest.raises(BadRequest, match="the model's chat template refuses this conversation: Too long, sorry"):
        dialect.render(talk(*[say("user", "a"), say("assistant", "b")] * 3))


@pytest.mark.parametrize("conversation", [talk(), talk(say("user", "")), talk(say("assistant"), say("user", " "))])
def test_nothing_to_render_is_a_bad_request(conversation: Conversation) -> None:
    with pytest.raises(BadRequest, match="no message has any content"):
        small_dialect(CHATML).render(conversation)


AWKWARD = {
    "system last": talk(say("user", "a"), say("system", "b")),
    "only system": talk(say("system", "be good")),
    "only assistant": talk(say("assistant", "I begin.")),
    "only a result": talk(result("1", "lost")),
    "developer": talk(say("developer", "a"), say("user", "b"), say("developer", "c"), say("user", "d")),
    "call without result": talk(say("user", "a"), say("assistant", call("1", "read_file", "{broken")), tools=[READ]),
    "two of each": talk(*[say("user", "a"), say("user", "b"), say("assistant", "c"), say("assistant", "d")] * 2),
    "parallel": talk(
        say("user", "a"),
        say("assistant", "t", call("1", "read_file", "null"), call("2", "status", "[]")),
        result("2", "b"),
        say("system", "s"),
        result("1", "a"),
        tools=TOOLS,
    ),
    "no user but a loop": talk(say("system", "s"), say("assistant", call("1", "status", {})), result("1", "ok")),
    "ends with assistant": talk(say("user", "a"), say("assistant", "b")),
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("thinking", [None, True, False])
def test_every_template_takes_what_agents_send(shared_template: str, name: str, thinking: bool | None) -> None:
    conversation = AWKWARD[name]
    conversation = Conversation(conversation.messages, conversation.tools, thinking=thinking)
    prompt = small_dialect(shared_template).render(conversation)
    assert prompt.tokens
    for message in conversation.messages:
        for part in message.parts:
            assert getattr(part, "text", "") in prompt.text


@pytest.mark.parametrize("name", AWKWARD)
def test_strict_template_is_given_what_it_can_render(name: str) -> None:
    """Mixtral's kind: no system, no tools, strictly user and assistant in turn."""
    source = (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    )
    assert "[INST]" in small_dialect(source).render(AWKWARD[name]).text


def test_checkpoint_without_template_speaks_chatml() -> None:
    prompt = small_dialect(None).render(talk(say("user", "hi")))
    assert prompt.text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_demo_template_takes_null_and_lists() -> None:
    """Clients of transformers send what our normalisation never does; the installed file stands on its own."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": None},
        {"role": "tool", "content": [{"type": "text", "text": "r"}]},
    ]
    rendered, _ = render_jinja_template([messages], chat_template=demo_template(), add_generation_prompt=True)
    assert rendered[0] == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n<|im_start|>user\n'
        "<tool_response>\n\n</tool_response>\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_grammar_is_read_from_the_template(shared_template: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    grammar = read_grammar(shared_template)
    assert grammar.xml_calls == (name in ("Qwen3-Coder", "Qwen3.5-4B"))
    assert grammar.json_calls == name.startswith("Qwen")
    assert grammar.reasoning == (not name.startswith(("google", "openai", "Qwen3-Coder")))


def test_grammar_of_our_own_templates() -> None:
    demo = read_grammar(demo_template())
    assert (demo.json_calls, demo.xml_calls, demo.reasoning) == (True, False, False)
    scripted = read_grammar((SMALL / "chat_template.jinja").read_text("utf-8"))
    assert scripted.openings


@pytest.mark.parametrize(
    ("choice", "xml", "hermes"),
    [
        (ToolChoice("required"), "<tool_call>\n<function=", '<tool_call>\n{"name": "'),
        (
            ToolChoice("named", "status"),
            "<tool_call>\n<function=status>\n",
            '<tool_call>\n{"name": "status", "arguments": ',
        ),
        (ToolChoice("auto"), "", ""),
        (ToolChoice("none"), "", ""),
    ],
)
def test_demanded_call_is_begun_by_the_prompt(choice: ToolChoice, xml: str, hermes: str) -> None:
    scripted = small_dialect("<tool_call> <function= <parameter= </think>" + CHATML + "<think>\n")
    for dialect, expected in ((scripted, xml), (small_dialect(demo_template()), hermes)):
        conversation = talk(say("user", "do"), tools=[STATUS], tool_choice=choice)
        prompt = dialect.render(conversation)
        assert prompt.prefilled == expected
        assert prompt.text.endswith(expected)
        assert prompt.in_reasoning == (dialect is scripted and not expected)
        if expected and dialect is scripted:
            assert prompt.text.endswith(f"<think>\n\n</think>\n\n{expected}")
        assert dialect.render(talk(say("user", "do"), tool_choice=choice)).prefilled == ""


def test_tools_do_not_leave_the_prompt_when_none_may_be_called() -> None:
    """Otherwise the whole prompt would be computed again; the parser keeps calls as text instead."""
    dialect = small_dialect(demo_template())
    free, barred = (talk(say("user", "do"), tools=[STATUS], tool_choice=ToolChoice(mode)) for mode in ("auto", "none"))
    assert dialect.render(barred).tokens == dialect.render(free).tokens
    text = '<tool_call>{"name": "status"}</tool_call>'
    parser = dialect.parser(barred, dialect.render(barred))
    assert [event.text for event in [*parser.feed(text), *parser.finish()]] == [text]


def test_stops_hold_the_turn_end() -> None:
    dialect = small_dialect(demo_template())
    assert dialect.encode("<|im_end|>")[0] in dialect.eos_token_ids
