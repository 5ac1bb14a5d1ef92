"""Recorded sessions of real agents, each answer remembered as it was generated: what is the next prompt's beginning?

Reference: the tokens of the last prompt and of the answer to it, which is what a model's cache holds.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from ftengine.core import BoundaryKind
from ftengine.dialect import Dialect, Prompt, open_dialect
from tests.dialect.conftest import NO_SHARED, SHARED, Files
from tests.dialect.families import render_cold
from tests.dialect.replay import Said, Step, scenarios, session, written
from tests.dialect.talk import call, result, say, think

pytestmark = pytest.mark.skipif(not scenarios(), reason=NO_SHARED)
TURN_END = 248046  # <|im_end|>


@dataclass
class Played:
    step: Step
    prompt: Prompt
    generated: list[int]  # empty: the recording has no whole answer


def open_qwen() -> Dialect:
    folder = SHARED / "tokenizers" / "qwen3.6"
    template = (folder / "chat_template.jinja").read_text("utf-8")
    return open_dialect(Files(Path(folder), template, eos_token_ids=(TURN_END,)))


@cache
def played() -> dict[str, list[Played]]:
    """All sessions on one server, as an engine would have answered them."""
    return {scenario: [play(_dialect(), step) for step in session(scenario)] for scenario in scenarios()}


def play(dialect: Dialect, step: Step) -> Played:
    prompt = dialect.render(step.conversation)
    generated: list[int] = []
    if (step.said.text or step.said.calls) and not step.aborted:
        try:
            generated = dialect.encode(written(step.said, in_reasoning=prompt.in_reasoning))
        except ValueError:  # arguments that are no JSON: a scripted one, nothing a parser lets pass
            return Played(step, prompt, [])
        dialect.remember(step.conversation, prompt, generated, step.said.events())
    return Played(step, prompt, generated)


def agents_steps() -> list[tuple[str, Played, Played]]:
    """Neighbouring requests of a session's main conversation: titles, which have no tools, are left out."""
    steps = []
    for scenario, all_steps in played().items():
        main = [one for one in all_steps if one.step.conversation.tools]
        steps += [(scenario, before, after) for before, after in itertools.pairwise(main)]
    return steps


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def kind_of(before: Played, after: Played) -> str:
    first, second = before.step.conversation, after.step.conversation
    added = second.messages[len(first.messages) :]
    if second.messages[: len(first.messages)] != first.messages:
        return "rewritten"
    if not added:
        return "repeated"
    if any(message.role not in ("assistant", "tool") for message in added):
        return "asked again"
    return "appended" if before.generated else "broken"


def test_what_was_generated_begins_the_next_prompt() -> None:
    kinds: Counter[str] = Counter()
    for scenario, before, after in agents_steps():
        kind = kind_of(before, after)
        kinds[kind] += 1
        same = common([*before.prompt.tokens, *before.generated], after.prompt.tokens)
        where = f"{scenario}/{before.step.name}, {kind}: {same} of {len(before.prompt.tokens)}"
        if kind == "appended":
            assert same == len(before.prompt.tokens) + len(before.generated), where
        elif kind == "repeated":
            assert same == len(before.prompt.tokens) == len(after.prompt.tokens), where
        elif kind == "broken":  # the template closes the reasoning that the prompt opened
            assert same >= len(before.prompt.tokens) - 1, where
    assert kinds["appended"] > 80
    assert kinds["repeated"] > 10


def test_a_new_question_changes_what_the_template_changes_and_nothing_else() -> None:
    """Qwen3.6 shows the turns before a question without reasoning: from the first of them on, and only so."""
    seen = 0
    for _, before, after in agents_steps():
        if kind_of(before, after) != "asked again":
            continue
        seen += 1
        same = common(before.prompt.tokens, after.prompt.tokens)
        assert spelled(before.prompt.tokens[:same]).endswith("<|im_start|>assistant\n")
        place = [boundary for boundary in before.prompt.boundaries if boundary.position <= same][-1]
        assert (place.kind, same - place.position) == (BoundaryKind.QUESTION_END, 3)
        without = re.sub(r"<think>\n.*?\n</think>\n\n", "", before.prompt.text, flags=re.DOTALL)
        assert after.prompt.text.startswith(without.removesuffix("<|im_start|>assistant\n<think>\n"))
    assert seen


def test_rewritten_histories_change_no_sooner_than_their_text() -> None:
    """OpenClaw moves a message to the end: all before it is kept, and there is a boundary right there."""
    moved = 0
    for scenario, before, after in agents_steps():
        if kind_of(before, after) != "rewritten":
            continue
        same = common(before.prompt.tokens, after.prompt.tokens)
        places = [boundary for boundary in before.prompt.boundaries if boundary.position <= same]
        assert places, scenario
        if scenario.startswith(("openclaw/tools", "openclaw/thinking")):
            moved += 1
            assert places[-1].kind is BoundaryKind.LAST_USER
            assert same - places[-1].position <= 2
        else:
            assert places[0].kind is BoundaryKind.SYSTEM
    assert moved >= 8


def test_boundaries_are_where_the_control_tokens_are() -> None:
    """Against the ids alone: content never has these, so each of them is the template's or the model's own."""
    qwen = reader()
    start, think_end, call, call_end = (
        qwen.encode(text)[0] for text in ("<|im_start|>", "</think>", "<tool_call>", "</tool_call>")
    )
    for scenario, steps in played().items():
        for one in steps:
            tokens = one.prompt.tokens
            found = {boundary.position: boundary.kind for boundary in one.prompt.boundaries}
            messages = {at for at, token in enumerate(tokens) if token == start and at}
            first = min(messages)
            assert found[first] is BoundaryKind.SYSTEM, scenario
            questions = {BoundaryKind.LAST_USER, BoundaryKind.QUESTION_END}
            whole = {BoundaryKind.SYSTEM, BoundaryKind.MESSAGE, *questions}
            assert {at for at, kind in found.items() if kind in whole} == messages, scenario
            inside = {think_end: BoundaryKind.THINKING, call: BoundaryKind.CALL_START, call_end: BoundaryKind.CALL_END}
            for at, token in enumerate(tokens[first:], first + 1):
                if token in inside and at < len(tokens):
                    assert found[at] is inside[token], scenario
            assert found[len(tokens)] is BoundaryKind.PROMPT_END


OF_EACH_CLIENT = (
    "claude/thinking",
    "claude/toolsearch",
    "codex/thinking",
    "openclaw/thinking",
    "opencode/long.compact",
)


@pytest.mark.parametrize(
    "chosen", [pytest.param(OF_EACH_CLIENT, id="some"), pytest.param(scenarios(), id="all", marks=pytest.mark.slow)]
)
def test_what_is_kept_of_earlier_prompts_changes_nothing(chosen: tuple[str, ...]) -> None:
    """Every prompt again, with nothing kept, against what it was in the course of its session."""
    for scenario in chosen:
        for one in played()[scenario]:
            again, cold = _dialect().render(one.step.conversation), render_cold(_dialect(), one.step.conversation)
            assert cold == again == one.prompt, scenario
        assert cold.text == spelled(cold.tokens), scenario


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    """The last prompt of each session, from a server that has only the file of the one before it."""
    file = tmp_path / "answers"
    played()
    _dialect().save_answers(file)
    restarted = open_qwen()
    restarted.load_answers(file)
    for scenario, steps in played().items():
        # An answer given to several sessions alike may come from another one of them: same values, same tokens here.
        assert restarted.render(steps[-1].step.conversation).tokens == steps[-1].prompt.tokens, scenario


@pytest.mark.slow
def test_grown_conversation_of_60k_tokens_takes_15_ms() -> None:
    """Claude's recorded loop gone on with to a hundred calls, each answer remembered."""
    dialect, conversation = open_qwen(), session("claude/thinking")[-1].conversation
    for number in range(100):
        call_id = f"toolu_{number:024x}"
        arguments = {"command": f"sed -n {number},{number + 40}p src/file_{number}.py", "description": "Show lines"}
        said = Said("First this.\nThen that. " * 9, f"Step {number}.", [[call_id, "Bash", json.dumps(arguments)]])
        play(dialect, Step("", conversation, said, aborted=False))
        lines = "\n".join(
            f"{at:5d}\tdef f_{number}_{at}(value: list[int]) -> int: return len(value)" for at in range(22)
        )
        back = say("assistant", think(said.reasoning.strip()), said.text, call(call_id, "Bash", arguments))
        conversation = replace(conversation, messages=(*conversation.messages, back, result(call_id, lines)))
    took = []
    for number in range(15):
        tail = say("assistant", "More.", call(f"more{number}", "Bash", {"command": f"ls {number}"}))
        output = result(f"more{number}", f"{number} one two three\n" * 40)
        grown = replace(conversation, messages=(*conversation.messages, tail, output))
        begin = time.perf_counter()
        prompt = dialect.render(grown)
        took.append(time.perf_counter() - begin)
    assert len(prompt.tokens) > 60_000
    assert sorted(took)[len(took) // 2] < 0.015, took


@cache
def _dialect() -> Dialect:
    return open_qwen()


def reader() -> Dialect:
    return _dialect()


def spelled(tokens: Sequence[int]) -> str:
    return reader()._codec.spelled(tokens)  # type: ignore[attr-defined]
