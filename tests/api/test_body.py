"""Decoding bodies and framing events, against Python's json and the SSE text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from ftengine.api.body import check_depth, decode, loads, without_lone_surrogates
from ftengine.api.language import SamplingDefaults
from ftengine.api.oversize import check_size
from ftengine.api.sampling import SamplingFields, sampling_params
from ftengine.api.settings import Limits
from ftengine.api.sse import event
from ftengine.conversation import (
    Conversation,
    Image,
    Message,
    Part,
    Text,
    ToolCall,
    ToolReference,
    ToolResult,
    ToolSpec,
)
from ftengine.errors import BadRequest, PromptTooLong, TooLarge
from tests.api.byte_dialect import ByteDialect
from tests.api.sse_reader import Frame, frames


class Holder(Struct):
    text: str = ""
    value: Any = None


ANY_TEXT = st.text(st.characters(), max_size=20)  # includes surrogates, U+0085, U+2028
PAIRS = "\ud83d\ude00"  # what json.loads joins to one character


@given(ANY_TEXT.map(lambda text: re.sub("[\ud800-\udfff]", "\ud800x", text)))
def test_lone_surrogates_become_replacement_characters(text: str) -> None:
    raw = json.dumps({"text": text}).encode()
    assert decode(raw, Holder, Limits()).text == re.sub("[\ud800-\udfff]", "\ufffd", text)


@pytest.mark.parametrize(
    ("raw", "mended"),
    [
        (rb'"\ud83d\ude00"', None),
        (rb'"\\ud83d"', None),
        (rb'"\ude00\ud83d"', rb'"\ufffd\ufffd"'),
        (rb'"\ud83d\\ude00"', rb'"\ufffd\\ude00"'),
        (rb'"\\\ud83d"', rb'"\\\ufffd"'),
        (rb'"\ud83dA"', rb'"\ufffdA"'),
    ],
)
def test_only_unpaired_escapes_are_mended(raw: bytes, mended: bytes | None) -> None:
    assert without_lone_surrogates(raw) == mended


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**40), 2**40) | ANY_TEXT, st.lists, max_leaves=5))
def test_loads_agrees_with_json(value: Any) -> None:
    text = json.dumps(value)
    expected = json.loads(re.sub(r"(?i)\\ud[89a-f][0-9a-f]{2}", r"\\ufffd", text)) if "\\ud" in text else value
    if not re.search(r"(?i)\\ud[89ab][0-9a-f]{2}\\ud[c-f]", text):
        assert loads(text) == expected


@pytest.mark.parametrize("text", ["", "{", "nul", "[1,]", "NaN", "[" * 5000])
def test_loads_of_no_json(text: str) -> None:
    assert loads(text) is None


def test_depth_is_counted_in_objects_and_arrays() -> None:
    limits = Limits(json_depth=3)
    check_depth({"a": [{"b": 1}]}, "x", limits)
    for plain in (None, 1, 1.5, "text", [], {}):
        check_depth(plain, "x", limits)
    with pytest.raises(BadRequest, match="nested"):
        check_depth({"a": [{"b": []}]}, "x", limits)


def test_values_are_counted_before_decoding() -> None:
    with pytest.raises(TooLarge):
        decode(b'{"value": [' + b"1," * 200 + b"1]}", Holder, Limits(body_values=100))


@given(ANY_TEXT.map(lambda text: re.sub("[\ud800-\udfff]", "", text)), st.integers(1, 7))
def test_frames_survive_any_text_and_any_cut(text: str, size: int) -> None:
    raw = event({"text": text}, "name") + event({"text": text})
    cut = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert list(frames(cut)) == [Frame("name", {"text": text}), Frame(None, {"text": text})]


# A small body may stand for a large prompt: each reference to a deferred tool writes its whole definition.
DEFERRED = ToolSpec("t", parameters={"x": "y" * 100_000}, deferred=True)
TOO_LONG_IN_OTHER_PARTS: tuple[tuple[Part, ...], ...] = (
    (ToolCall("1", "t", {"x": "y" * 1_200_000}),),
    (ToolCall("1", "t", "y" * 1_200_000),),
    (ToolResult("1", (ToolReference("t"),) * 100_000),),
    (Image("image"),) * 40_000,
    (Text("y" * 30),) * 60_000,
)


def test_a_prompt_far_too_long_is_not_tokenized_to_its_end() -> None:
    class Counting(ByteDialect):
        seen = 0

        def encode(self, text: str) -> list[int]:
            self.seen += len(text)
            return super().encode(text)

    dialect = Counting()
    long = Conversation((Message("user", (Text("x" * 5_000_000),)),))
    with pytest.raises(PromptTooLong) as caught:
        check_size(long, dialect, 40_000)
    assert dialect.seen < 100_000
    assert abs(caught.value.tokens - 5_000_000) < 50_000, "the number is extrapolated to the whole"
    tools = Conversation((), (ToolSpec("t", parameters={"x": "y" * 1_200_000}),))
    with pytest.raises(PromptTooLong):
        check_size(tools, dialect, 40_000)
    for parts in TOO_LONG_IN_OTHER_PARTS:
        with pytest.raises(PromptTooLong):
            check_size(Conversation((Message("user", parts),), (DEFERRED,)), dialect, 40_000)
    dialect.seen = 0
    check_size("x" * 200_000, dialect, 40_000)
    assert dialect.seen == 0, "what may fit is left to the real rendering"


def test_sampling_defaults_come_from_the_checkpoint() -> None:
    read = SamplingDefaults.read({"temperature": 0.6, "top_k": 20, "top_p": "x", "min_p": float("nan"), "extra": 1})
    assert read == SamplingDefaults(temperature=0.6, top_k=20)
    assert SamplingDefaults.read({"do_sample": False, "temperature": 0.6}).temperature == 0
    assert SamplingDefaults.read({"temperature": -1, "top_k": True}) == SamplingDefaults()
    params = sampling_params(SamplingFields(top_k=-1, seed=-5), read, max_tokens=3, vocab_size=9, end_tokens=(7,))
    assert (params.temperature, params.top_k, params.max_tokens, params.stop_token_ids) == (0.6, 0, 3, (7,))
    assert params.seed is not None
    assert params.seed >= 0
    free = sampling_params(SamplingFields(ignore_eos=True), read, max_tokens=3, vocab_size=9, end_tokens=(7,))
    assert (free.ignore_eos, free.stop_token_ids) == (True, ())
