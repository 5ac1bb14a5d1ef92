"""Prompts of conversations that are edited at random, against those of a dialect that has seen none before."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from ftengine.conversation import Conversation, Message, Reasoning, Text, ToolCall, ToolResult
from ftengine.dialect import Dialect, Prompt
from tests.dialect.conftest import TEMPLATES
from tests.dialect.families import family, render_cold
from tests.dialect.talk import TOOLS, call, result, say, talk, think

SOME = ("Qwen3.5-4B", "GLM-4.6", "deepseek-ai-DeepSeek-V4")
WORDS = (
    "alpha",
    "<|im_end|>",
    "</think>",
    "\n\n",
    "  ",
    "beta é",
    "<tool_call>",
    "\ufdd0",
    "<|user|>",
    "gamma " * 40,
    "7",
)


class Editor:
    """Grows and edits one conversation as clients and people do."""

    def __init__(self, chance: random.Random, dialect: Dialect) -> None:
        self._chance = chance
        self._dialect = dialect
        self._calls = 0
        self.conversation = talk(say("system", self._words()), say("user", "Go. " + self._words()), tools=TOOLS)

    def step(self) -> None:
        edits = [self._answer] * 8 + [self._ask, self._ask, self._drop_reasoning, self._clear_result, self._cut]
        edits += [self._truncate, self._reword, self._think_or_not]
        self._chance.choice(edits)()

    def _answer(self) -> None:
        """The model's turn, remembered, and sent back as clients do: arguments re-serialised, with a default added."""
        prompt = self._dialect.render(self.conversation)
        self._calls += 1
        reasoning = self._words() if prompt.in_reasoning else ""
        said, path = self._chance.choice(("", self._words())), self._words()
        text = (f"{reasoning}\n</think>\n\n" if prompt.in_reasoning else "") + said
        text += f'\n\n<tool_call>\n{{"name": "read_file",  "arguments": {json.dumps({"path": path})} }}\n</tool_call>'
        tokens = self._tokens(prompt, text)
        parser, decoder = self._dialect.parser(self.conversation, prompt), self._dialect.decoder()
        stop = [self._dialect.eos_token_ids[0]]
        events = parser.feed(decoder.feed(tokens) + decoder.finish()) + parser.finish()
        if self._chance.random() < 0.8:
            self._dialect.remember(self.conversation, prompt, tokens + stop, events)
        parts = []
        reasoned = "".join(event.text for event in events if type(event).__name__ == "ReasoningDelta")
        spoken = "".join(event.text for event in events if type(event).__name__ == "TextDelta")
        parts += [Reasoning(reasoned)] if reasoned and self._chance.random() < 0.7 else []
        parts += [Text(spoken)] if spoken else []
        calls = [(event.id, event.name) for event in events if type(event).__name__ == "ToolCallStart"]
        ends = [event.arguments for event in events if type(event).__name__ == "ToolCallEnd"]
        for (call_id, name), arguments in zip(calls, ends, strict=True):
            given = {"limit": False, **json.loads(arguments)}
            parts.append(ToolCall(call_id.replace("_", ""), name, given))
        results = [result(call_id, self._words()) for call_id, _ in calls]
        self._set([*self.conversation.messages, Message("assistant", tuple(parts)), *results])

    def _tokens(self, prompt: Prompt, text: str) -> list[int]:
        """Not always as the tokenizer would cut it."""
        at = self._chance.randrange(len(text))
        return self._dialect.encode(text[:at]) + self._dialect.encode(text[at:])

    def _ask(self) -> None:
        self._set([*self.conversation.messages, say("user", self._words())])

    def _drop_reasoning(self) -> None:
        def kept(message: Message) -> Message:
            return replace(message, parts=tuple(part for part in message.parts if not isinstance(part, Reasoning)))

        self._set([kept(message) for message in self.conversation.messages])

    def _clear_result(self) -> None:
        messages = list(self.conversation.messages)
        places = [at for at, message in enumerate(messages) if message.role == "tool"]
        if places:
            at = self._chance.choice(places)
            part = messages[at].parts[0]
            assert isinstance(part, ToolResult)
            messages[at] = Message("tool", (ToolResult(part.call_id, (Text("[cleared]"),)),))
            self._set(messages)

    def _cut(self) -> None:
        messages = list(self.conversation.messages)
        begin = self._chance.randrange(1, len(messages) + 1)
        del messages[begin : begin + self._chance.randrange(1, 5)]
        self._set(messages)

    def _truncate(self) -> None:
        self._set([*self.conversation.messages[:1], *self.conversation.messages[-6:]])

    def _reword(self) -> None:
        self._set([say("system", self._words()), *self.conversation.messages[1:]])

    def _think_or_not(self) -> None:
        self.conversation = replace(self.conversation, thinking=self._chance.choice([None, True, False]))

    def _set(self, messages: list[Message]) -> None:
        if not any(message.role == "user" for message in messages):
            messages.append(say("user", "Go on."))
        self.conversation = replace(self.conversation, messages=tuple(messages))

    def _words(self) -> str:
        return " ".join(self._chance.choices(WORDS, k=self._chance.randint(1, 5))).strip() or "x"


def check(dialect: Dialect, conversation: Conversation) -> None:
    warm, cold = dialect.render(conversation), render_cold(dialect, conversation)
    assert warm.tokens == cold.tokens
    assert warm == cold
    positions = [boundary.position for boundary in warm.boundaries]
    assert positions == sorted(set(positions))
    assert positions[-1] == len(warm.tokens)
    assert dialect._codec.spelled(warm.tokens) == warm.text  # type: ignore[attr-defined]


def edited(name: str, seed: int, steps: int) -> None:
    template = next(path for path in TEMPLATES if path.stem == name).read_text("utf-8")
    dialect, chance = family(template, name), random.Random(seed)
    editors = [Editor(chance, dialect) for _ in range(3)]
    for _ in range(steps):
        editor = chance.choice(editors)
        editor.step()
        check(dialect, editor.conversation)


@pytest.mark.skipif(not TEMPLATES, reason="../shared is not beside the repository")
@pytest.mark.parametrize("name", SOME)
def test_random_edits(name: str) -> None:
    edited(name, seed=1, steps=150)


@pytest.mark.slow
def test_many_random_edits(shared_template: str, request: pytest.FixtureRequest) -> None:
    edited(str(request.node.callspec.id), seed=random.randrange(1 << 32), steps=1500)


def test_one_thread_does_not_disturb_another(qwen: Dialect) -> None:
    from concurrent.futures import ThreadPoolExecutor

    talks = [
        talk(
            say("system", "S"),
            say("user", f"u{chain}"),
            *[
                message
                for number in range(length)
                for message in (
                    say("assistant", think(f"t{number}"), call(f"c{chain}{number}", "read_file", {"path": "a"})),
                    result(f"c{chain}{number}", f"r{number}"),
                )
            ],
            tools=TOOLS,
        )
        for chain in range(4)
        for length in range(6)
    ]
    expected = [render_cold(qwen, one) for one in talks]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(qwen.render, talks)) == expected
