"""The answer's state machine, fed by hand: same events however tokens are cut, counts, and ends."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ftengine.api.answer import Answer, Finished, Started
from ftengine.api.collect import Collected
from ftengine.conversation import Reasoning, Text, ToolCall
from ftengine.core import FinishReason, Reused
from ftengine.wire import Output
from tests.api.byte_dialect import END, ByteDecoder, ByteParser

SAY = '<think>hmm 😀</think>é text <call>{"name": "f", "arguments": {"x": "ü"}}</call> after STOP never'


def answer(
    tokens: list[list[int]], finish: FinishReason, *, stops: tuple[str, ...] = (), tools: bool = True
) -> Collected:
    machine = Answer(decoder=ByteDecoder(), parser=ByteParser(tools), prompt_tokens=10, stops=stops)
    collected = Collected()
    outputs = [Output("r", [], 4), *(Output("r", piece, 4) for piece in tokens)]
    last = [END] if finish is FinishReason.STOP else []
    outputs.append(Output("r", last, 4, finish))
    started = 0
    for output in outputs:
        if machine.finished:
            break
        for chunk in machine.feed(output):
            started += isinstance(chunk, Started)
            collected.add(chunk)
    assert started == 1
    return collected


def pieces_of(text: str, cuts: list[int]) -> list[list[int]]:
    raw = list(text.encode())
    places = sorted({cut % (len(raw) + 1) for cut in cuts} | {0, len(raw)})
    return [raw[start:end] for start, end in pairwise(places)]


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_the_same_answer_however_it_is_cut(cuts: list[int]) -> None:
    collected = answer(pieces_of(SAY, cuts), FinishReason.STOP, stops=("STOP",))
    assert collected.items[:2] == [Reasoning("hmm 😀"), Text("é text ")]
    call = collected.items[2]
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("f", '{"x": "ü"}')
    assert collected.items[3] == Text(" after ")
    assert (collected.end.reason, collected.end.stop_string) == ("stop_string", "STOP")


def test_counts() -> None:
    say = "<think>abc</think>de"
    end = answer([[byte] for byte in say.encode()], FinishReason.STOP).end
    assert (end.usage.prompt, end.usage.cached, end.usage.output) == (10, 4, len(say) + 1)
    assert len("abc") <= end.usage.reasoning <= len("<think>abc</think>")


def test_what_was_reused_is_what_the_first_output_says() -> None:
    """A request that had to give up its place finds its own tokens in the cache when it goes on; they are no reuse."""
    machine = Answer(decoder=ByteDecoder(), parser=ByteParser(True), prompt_tokens=10)
    outputs = [
        Output("r", [], 4, reused=Reused(4)),
        Output("r", [97], 4),
        Output("r", [98, END], 11, FinishReason.STOP),
    ]
    chunks = [chunk for output in outputs for chunk in machine.feed(output)]
    usages = [chunk.usage for chunk in chunks if isinstance(chunk, (Started, Finished))]
    assert [(usage.prompt, usage.cached, usage.kept) for usage in usages] == [(10, 4, 5), (10, 4, 5)]


def test_length_wins_over_tool_calls_and_text_held_back_comes_out() -> None:
    say = '<call>{"name": "f", "arguments": {}}</call>ST'
    collected = answer([list(say.encode())], FinishReason.LENGTH, stops=("STOP",))
    assert collected.end == Finished("length", collected.end.usage)
    assert collected.items[-1] == Text("ST")


def test_half_a_character_at_the_end_is_replaced() -> None:
    collected = answer([list("aé".encode())[:-1]], FinishReason.LENGTH)
    assert collected.items == [Text("a\ufffd")]
