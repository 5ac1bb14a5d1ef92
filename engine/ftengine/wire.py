"""What the front and the engine say to each other over their Unix socketpair.

A frame is a 4-byte little-endian length and a msgpack-encoded message. Torch-free. A peer that sends a frame
longer than `MAX_FRAME` or one that does not decode is treated as dead.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from ftengine.core import FinishReason, Request, Reused

MAX_FRAME = 256 << 20
HEADER = struct.Struct("<I")
MOST_TRACE_STEPS = 4096  # a recording of 100 layers then takes 60 MB, in one frame
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say, as in OpenAI's API


class Submit(msgspec.Struct, tag=True, frozen=True):
    request: Request


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """The client left, or the front saw a stop string. Unknown and finished ids are ignored."""

    id: str


class AskStats(msgspec.Struct, tag=True, frozen=True):
    layers: bool = False  # with the numbers of each layer of the expert cache


class Trace(msgspec.Struct, tag=True, frozen=True):
    """Record the routing of the next `steps` decode steps. Answered by one Traced with this id."""

    id: int
    steps: int


class StopTrace(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for that recording any more. Not answered; ids not known are ignored."""

    id: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    pass


ToEngine = Submit | Cancel | AskStats | Trace | StopTrace | Shutdown


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Progress until ready. `done` is a fraction 0..1 of the whole start."""

    stage: str
    done: float


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Resolved facts of the running engine; see docs/api.md, /health and /v1/stats."""

    architecture: str
    context_length: int  # tokens a sequence may have, prompt and output together
    max_running: int
    dtype: str
    device: str
    kv_tokens: int  # shared by all sequences
    facts: dict[str, Any] = {}  # name -> value and reason, for the log and /v1/stats


class TokenLogprob(msgspec.Struct, frozen=True):
    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Output(msgspec.Struct, tag=True, frozen=True):
    """New tokens of one request. The stop token itself is included in `tokens` when finish is `stop`.

    The first Output of a request may have no tokens (it tells `cached_tokens` when prefill starts).
    """

    id: str
    tokens: list[int]
    cached_tokens: int
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    reused: Reused | None = None  # in the first one only


class Failed(msgspec.Struct, tag=True, frozen=True):
    """One request could not be served; the engine lives."""

    id: str
    message: str
    overloaded: bool = False


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start or go on; it exits after this."""

    message: str
    next_step: str = ""


class Stats(msgspec.Struct, tag=True, frozen=True):
    values: dict[str, Any]


class Traced(msgspec.Struct, tag=True, frozen=True):
    """data: an .npz file (experts/trace.py). Without one, `refusal` says why."""

    id: int
    data: bytes = b""
    refusal: str = ""


ToFront = Loading | Ready | Output | Failed | Fatal | Stats | Traced

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


def encode(message: ToEngine | ToFront) -> bytes:
    """The whole frame, header included."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def decode_to_engine(body: bytes) -> ToEngine:
    return _to_engine.decode(body)


def decode_to_front(body: bytes) -> ToFront:
    return _to_front.decode(body)
