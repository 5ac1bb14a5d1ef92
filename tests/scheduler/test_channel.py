"""Frames in and out against a plain socket, cut and damaged."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from ftengine import wire
from ftengine.core import Request, SamplingParams
from ftengine.scheduler.channel import Channel, FrontGone

SUBMIT = wire.Submit(Request("a", [1, 2, 3], SamplingParams(max_tokens=5, logit_bias={7: 1.5}, stop_token_ids=(4,))))


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ended = threading.Event()
    channel = Channel(theirs, ended.set)
    channel.start()
    yield ours, channel, ended
    ours.close()
    assert ended.wait(5)
    theirs.close()


def test_frames_cut_anywhere_arrive_whole_and_in_order(pair) -> None:
    ours, channel, _ = pair
    data = b"".join(wire.encode(message) for message in (SUBMIT, wire.Cancel("a"), wire.AskStats()))
    for byte in data:
        ours.sendall(bytes([byte]))
    received: list = []
    while len(received) < 3:
        received += channel.receive(wait=True)
    assert received == [SUBMIT, wire.Cancel("a"), wire.AskStats()]
    assert channel.receive(wait=False) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        struct.pack("<I", 10) + b"short",
        struct.pack("<I", wire.MAX_FRAME + 1) + b"x",
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + b"\x05",
    ],
)
def test_a_damaged_stream_is_a_gone_front(pair, data: bytes) -> None:
    ours, channel, ended = pair
    ours.sendall(data)
    ours.shutdown(socket.SHUT_WR)
    assert channel.receive(wait=True) == [None]
    assert ended.wait(5)


def test_shutdown_is_delivered_and_ends_the_reading(pair) -> None:
    ours, channel, ended = pair
    ours.sendall(wire.encode(wire.Shutdown()))
    assert channel.receive(wait=True) == [wire.Shutdown()]
    assert ended.wait(5)


def test_several_messages_go_out_in_one_write_and_a_closed_end_is_said(pair) -> None:
    ours, channel, _ = pair
    messages = [wire.Output("a", [1], 0), wire.Failed("b", "no")]
    channel.send(messages)
    assert ours.recv(1 << 16) == b"".join(wire.encode(message) for message in messages)
    ours.close()
    with pytest.raises(FrontGone):
        channel.send(messages)


def test_wake_ends_a_wait_and_is_no_message(pair) -> None:
    ours, channel, _ = pair
    timer = threading.Timer(0.05, channel.wake)
    timer.start()
    assert channel.receive(wait=True) == []
    timer.join()
    channel.wake()
    channel.wake()
    assert channel.receive(wait=False) == []
    channel.wake()
    ours.sendall(wire.encode(wire.Cancel("a")))
    found: list = []
    while not found:
        found = channel.receive(wait=True)
    assert found == [wire.Cancel("a")]
