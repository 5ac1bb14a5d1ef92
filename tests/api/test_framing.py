"""Every stream is valid frames whose joined text is what the model said, whatever it said and however the tokens
were cut (faults.md row 28). Read back by a strict reader, without HTTP in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ftengine.api.answer import Answer
from ftengine.api.anthropic.stream import MessageStream
from ftengine.api.chat.stream import ChatStream
from ftengine.api.completions.encode import CompletionStream
from ftengine.api.respond import Encoder
from ftengine.api.responses.output import ResponseFrame
from ftengine.api.responses.request import ResponsesRequest
from ftengine.api.responses.stream import ResponseStream
from ftengine.api.responses.tools import Tools
from ftengine.api.settings import Limits
from ftengine.api.translate import Notes
from ftengine.core import FinishReason
from ftengine.wire import Output
from tests.api.byte_dialect import END, ByteDecoder, ByteDialect, ByteParser
from tests.api.sse_reader import Frame, frames

PIECES = [
    "a",
    " ",
    "\n",
    "\r\n",
    "\n\n",
    "data: x\n\n",
    "é",
    "\x85",
    "\u2028",
    "\u2029",
    "😀",
    "👩‍👩‍👧",
    "\x00",
    "\x1b",
    '"',
    "\\",
    "<",
    "日本",
]


def chat() -> Encoder:
    text = ByteDialect().token_text
    return ChatStream("m", 1, include_usage=True, freeform=frozenset(), token_text=text)


def completion() -> Encoder:
    return CompletionStream("m", [""], answers_per_prompt=1, include_usage=True, token_text=ByteDialect().token_text)


def responses() -> Encoder:
    return ResponseStream(ResponseFrame(ResponsesRequest(), "m"), Tools(Limits(), Notes()))


def messages_text(data: Any) -> str:
    return data.get("delta", {}).get("text", "") if data["type"] == "content_block_delta" else ""


def chat_text(data: Any) -> str:
    return "" if data == "[DONE]" else "".join(choice["delta"].get("content", "") for choice in data["choices"])


def completion_text(data: Any) -> str:
    return "" if data == "[DONE]" else "".join(choice["text"] for choice in data["choices"])


def responses_text(data: Any) -> str:
    return data["delta"] if data["type"] == "response.output_text.delta" else ""


APIS: dict[str, tuple[Callable[[], Encoder], Callable[[Any], str]]] = {
    "messages": (lambda: MessageStream("m"), messages_text),
    "chat": (chat, chat_text),
    "completions": (completion, completion_text),
    "responses": (responses, responses_text),
}


def streamed(encoder: Encoder, raw: bytes, dice: random.Random) -> bytes:
    """What the client gets for an answer of the bytes `raw`, cut anywhere, with heartbeats between."""
    answer = Answer(decoder=ByteDecoder(), parser=ByteParser(False), prompt_tokens=1)
    sent = encoder.opening()
    place = 0
    while place < len(raw):
        size = dice.randint(1, 5)
        for chunk in answer.feed(Output("r", list(raw[place : place + size]), 0)):
            sent += encoder.chunk(0, chunk)
        place += size
        if dice.random() < 0.1:
            sent += encoder.heartbeat()
    for chunk in answer.feed(Output("r", [END], 0, FinishReason.STOP)):
        sent += encoder.chunk(0, chunk)
    return sent + encoder.closing()


def check(api: str, seed: int) -> None:
    dice = random.Random(seed)
    make, text_of = APIS[api]
    raw = "".join(dice.choices(PIECES, k=dice.randint(1, 30))).encode()
    raw = raw[: len(raw) - dice.choice([0, 0, 1, 2])]  # perhaps the answer ends inside a character
    sent = streamed(make(), raw, dice)
    got = [frame for frame in frames([sent]) if isinstance(frame, Frame)]
    assert "".join(text_of(frame.data) for frame in got) == raw.decode("utf-8", "replace"), seed


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("streams", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_invalid_frame(api: str, streams: int) -> None:
    for seed in range(streams):
        check(api, seed)
