"""However an answer is cut, it means the same; and whatever it is, calls are whole and arguments valid JSON."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftengine.dialect.answer.parser import Grammar
from ftengine.dialect.json_stream import JsonStream
from tests.dialect.talk import EVERYTHING, answer, check_integrity, meaning

GRAMMARS = (EVERYTHING, Grammar(json_calls=True, reasoning=True), Grammar(xml_calls=True), Grammar(reasoning=True))
PIECES = (
    "<tool_call>",
    "</tool_call>",
    "<function=write_file>",
    "<function=status>",
    "<function=unknown>",
    "</function>",
    "<parameter=path>",
    "<parameter=content>",
    "<parameter=mode>",
    "<parameter=options>",
    "<parameter=other>",
    "</parameter>",
    "<think>",
    "</think>",
    '{"name": "status"}',
    '{"name": "write_file", "arguments": {',
    '"name": "unknown", ',
    '"path": ',
    '"a"',
    "\n",
    " ",
    *"{}[]:,'\"\\`<>1x",
    "\\u12",
    "\\ud83d",
    "\\ude00",
    "True",
    "null",
    "é😀",
    "```",
    "</",
    "<par",
    "word",
)
BEGINNINGS = (
    "",
    "",
    "<tool_call>\n<function=write_file>\n<parameter=path>\n",
    '<tool_call>\n{"name": "write_file", "arguments": {',
)


def check(text: str, cuts: list[int], grammar: Grammar, in_reasoning: bool) -> None:
    whole = answer(text, grammar=grammar, in_reasoning=in_reasoning)
    pieces = answer(text, cuts, grammar, in_reasoning=in_reasoning)
    check_integrity(whole)
    check_integrity(pieces)
    assert meaning(pieces) == meaning(whole)


@given(
    beginning=st.sampled_from(BEGINNINGS),
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    grammar=st.sampled_from(GRAMMARS),
    in_reasoning=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_cuts_do_not_matter(
    beginning: str, pieces: list[str], cuts: list[int], grammar: Grammar, in_reasoning: bool
) -> None:
    text = beginning + "".join(pieces)
    check(text, sorted(min(cut, len(text)) for cut in cuts), grammar, in_reasoning)
    check(text, list(range(1, len(text))), grammar, in_reasoning)


def fuzz(count: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        text = chance.choice(BEGINNINGS) + "".join(chance.choices(PIECES, k=chance.randint(1, 25)))
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randint(1, 8)))
        check(text, cuts, chance.choice(GRAMMARS), chance.random() < 0.1)


def test_random_tags() -> None:
    fuzz(20_000, seed=1)


@pytest.mark.slow
def test_many_random_tags() -> None:
    fuzz(200_000, seed=random.randrange(1 << 32))


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
@settings(max_examples=200, deadline=None)
def test_answers_without_tools_are_untouched(text: str) -> None:
    assert meaning(answer(text, grammar=Grammar(json_calls=True, xml_calls=True), tools=())) == (
        [("text", text)] if text else []
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.booleans(), st.sampled_from([None, 2]), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_valid_json_passes_as_the_json_module_reads_it(
    value: object, ascii_only: bool, indent: int | None, step: int
) -> None:
    """Against `json`: same value, compact, in any pieces and with anything behind it."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent) + " "
    stream = JsonStream()
    at = 0
    for end in (*range(step, len(text), step), len(text)):
        at = stream.consume(text[:end], at, final=False)
    stream.consume(text, at, final=True)
    assert stream.done
    assert not stream.broken
    output = "".join(stream.output)
    assert json.loads(output) == value
    assert len(output) <= len(json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")))


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
@settings(max_examples=300, deadline=None)
def test_anything_closes_to_valid_json(text: str) -> None:
    stream = JsonStream()
    stream.consume(text, 0, final=True)
    stream.close()
    json.loads("".join(stream.output), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.timeout(20)  # each one read to the end of the answer, it takes minutes
def test_an_unfinished_call_repeated_without_end_stays_text() -> None:
    """Small models fall into such loops; the end of the answer must not hold up all other streams."""
    text = "```\n" + '<tool_call>{"a' * 6_000
    assert meaning(answer(text, grammar=Grammar(json_calls=True, xml_calls=True))) == [("text", text)]
