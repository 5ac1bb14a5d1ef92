"""Prompts, against transformers' own rendering of each template and against the tokenizer's own encoding."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftengine.conversation import Conversation
from ftengine.dialect import open_dialect
from ftengine.dialect.opening import demo_template
from tests.dialect.conftest import SMALL, Files, library, small_dialect
from tests.dialect.talk import READ, call, result, say, talk, think
from tests.support.timing import quickest, seconds

FUNCTIONS = [
    {
        "type": "function",
        "function": {"name": READ.name, "description": READ.description, "parameters": READ.parameters},
    }
]


def sent(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


PLAIN = (
    talk(
        say("system", "Be brief."), say("user", "Hé <b>'you'</b> & 你好?"), say("assistant", "Yes."), say("user", "Go.")
    ),
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hé <b>'you'</b> & 你好?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go."},
    ],
)
LOOP = (
    talk(
        say("system", "Be brief."),
        say("user", "Read a."),
        say("assistant", think("I need it."), call("c1", "read_file", {"path": "ä <b>.txt"})),
        result("c1", "one\n  two"),
        tools=[READ],
    ),
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Read a."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I need it.",
            "thinking": "I need it.",  # as gpt-oss templates name it; only transformers after 5.20 adds it by itself
            "tool_calls": [sent("c1", "read_file", {"path": "ä <b>.txt"})],
        },
        {"role": "tool", "content": "one\n  two", "tool_call_id": "c1", "name": "read_file"},
    ],
)


def reference(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """transformers' rendering, which shares no code with ours."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        **variables,
    )
    return str(rendered[0])


@pytest.mark.parametrize(("conversation", "messages"), [PLAIN, LOOP], ids=["plain", "loop"])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_every_template_renders_as_in_transformers(
    shared_template: str, conversation: Conversation, messages: list[dict[str, Any]], thinking: bool | None
) -> None:
    tools = FUNCTIONS if conversation.tools else None
    variables = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    conversation = talk(*conversation.messages, tools=conversation.tools, thinking=thinking)
    prompt = small_dialect(shared_template).render(conversation)
    assert prompt.text == reference(shared_template, messages, tools=tools, **variables)
    assert prompt.in_reasoning == prompt.text.rstrip().endswith("<think>")


@pytest.mark.parametrize("template", [demo_template(), (SMALL / "chat_template.jinja").read_text("utf-8")])
@pytest.mark.parametrize(("conversation", "messages"), [PLAIN, LOOP], ids=["plain", "loop"])
def test_our_own_templates_render_as_in_transformers(
    template: str, conversation: Conversation, messages: list[dict[str, Any]]
) -> None:
    tools = FUNCTIONS if conversation.tools else None
    assert small_dialect(template).render(conversation).text == reference(template, messages, tools=tools)


CONVENTIONS = """
{%- for message in messages %}
    {% if message.content == "Yes." %}{% continue %}{% endif %}
    {% generation %}{% set text = message.content %}{{ text | upper }}{% endgeneration %}
    {{ {"b": [1, "<é>"], "a": message.content} | tojson }} {{ {"x": 1} | tojson(indent=2) }} {{ text is defined }}
    {% for key, value in {"q": 1} | items %}{{ key ~ value ~ missing }}{% endfor %}
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now("%Y") | length }} {{ bos_token }}
"""


def test_conventions_of_templates_are_those_of_transformers() -> None:
    """Block trimming, loop controls, JSON, scoping and the `generation` tag."""
    prompt = small_dialect(CONVENTIONS).render(PLAIN[0])
    assert prompt.text == reference(CONVENTIONS, PLAIN[1])


@pytest.mark.parametrize(
    "name",
    [
        "qwen3.6",
        "gpt-oss",
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("deepseek-v4", marks=pytest.mark.slow),
    ],
)
def test_prompt_ids_are_the_tokenizers_own(name: str, shared_tokenizer: Callable[[str], Path]) -> None:
    """On content without control tokens the pieces encode to what the whole text encodes to."""
    folder = shared_tokenizer(name)
    shared = Path(__file__).resolve().parents[3] / "shared" / "tokenizers" / name
    config = json.loads((shared / "tokenizer_config.json").read_text("utf-8"))
    path = shared / "chat_template.jinja"
    template = path.read_text("utf-8") if path.exists() else config["chat_template"]
    dialect = open_dialect(Files(folder, template, config))
    plain = library(folder / "tokenizer.json")
    for conversation, _ in (PLAIN, LOOP):
        for _ in range(2):  # the second time from the cache
            prompt = dialect.render(conversation)
            assert prompt.tokens == plain.encode(prompt.text, add_special_tokens=False).ids
    text = "  spaces\n\n\ttabs <|im_start|>x<|im_end|>\n e\u0301 and 12345 <tool_call>"
    assert dialect.encode(text) == plain.encode(text, add_special_tokens=True).ids


def test_agent_prompt_renders_fast() -> None:
    """A prompt of 20,000 tokens after the first: its pieces are known. The bound leaves room for a busy machine."""
    dialect = small_dialect((SMALL / "chat_template.jinja").read_text("utf-8"))
    steps = [say("user", "word " * 15_000)]
    for number in range(40):
        steps.append(say("assistant", "I look.", call(f"c{number}", "read_file", {"path": "a"})))
        steps.append(result(f"c{number}", f"line {number} of the file\n" * 50))
    first = dialect.render(talk(*steps, tools=[READ]))
    assert len(first.tokens) > 20_000
    questions = (say("user", f"And {number}?") for number in itertools.count())
    assert quickest(lambda: seconds(lambda: dialect.render(talk(*steps, next(questions), tools=[READ]))), 0.25) < 0.25


def test_front_stays_light() -> None:
    """Importing the dialect loads neither torch nor transformers nor the tokenizer library."""
    import subprocess
    import sys

    probe = (
        "import sys, ftengine.dialect; print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_long_prompt_that_is_being_encoded_lets_other_threads_run() -> None:
    """The thread that carries all streams is one of them."""
    dialect = small_dialect(demo_template())

    def longest(text: str) -> float:
        """For how much of the whole time another thread had to wait at once."""
        stamps = [time.perf_counter()]
        encoding = threading.Thread(target=dialect.encode, args=(text,))
        encoding.start()
        while encoding.is_alive():
            time.sleep(0.001)
            stamps.append(time.perf_counter())
        return max(after - before for before, after in itertools.pairwise(stamps)) / (stamps[-1] - stamps[0])

    texts = (f"one word and other things, {number} " * 40_000 for number in itertools.count())
    assert quickest(lambda: longest(next(texts)), 0.5) < 0.5
