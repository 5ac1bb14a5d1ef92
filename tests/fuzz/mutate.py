"""Ways to damage an input: bits, lengths and counts, blocks, and JSON's own structure."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

INTEGERS = (0, 1, 7, 8, 31, 32, 255, 256, 4095, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40)
LONGS = (*INTEGERS, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 8)
TOKENS = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"true", b"-1", b"1e999", b"NaN", b"\\u0000", b"\\ud800"),
    *(b"../", b"\0", b"\xff\xfe", b"\xf0\x9f\x98\x80", b"9" * 400, b"[" * 300, b'{"a":' * 300, b"\r\n", b" " * 100),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, 1 << 31, 1 << 53, 1 << 64, -(1 << 63), 10**30),
    *("", "a", "\0", "../x", "/etc/passwd", "x" * 300, "\u202e", "BF16", "model.safetensors", "\ud800"),
    *([], {}, [[]], [1, 2, 3], {"a": {}}, [0, 1 << 62], ["x"] * 50, [[[[[[[[]]]]]]]]),
)


def mutate(chance: random.Random, corpus: Sequence[bytes]) -> bytes:
    """A new input out of one or two of the corpus, damaged in one to four ways."""
    content = chance.choice(corpus)
    for _ in range(chance.choice((1, 1, 2, 4))):
        content = chance.choice(WAYS)(chance, content, corpus)
    return content


def _flip(chance: random.Random, content: bytes, _: Sequence[bytes]) -> bytes:
    changed = bytearray(content or b"\0")
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _byte(chance: random.Random, content: bytes, _: Sequence[bytes]) -> bytes:
    changed = bytearray(content or b"\0")
    changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _number(chance: random.Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """A length or count, little-endian, 4 or 8 bytes."""
    packed = struct.pack("<I", chance.choice(INTEGERS) & 0xFFFFFFFF)
    if chance.random() < 0.5:
        packed = struct.pack("<Q", chance.choice(LONGS))
    at = chance.randrange(len(content) + 1)
    return content[:at] + packed + content[at + len(packed) :]


def _step(chance: random.Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """A number one up or down."""
    if len(content) < 8:
        return content
    at = chance.randrange(len(content) - 7)
    (value,) = struct.unpack_from("<Q", content, at)
    return content[:at] + struct.pack("<Q", (value + chance.choice((-1, 1))) & (1 << 64) - 1) + content[at + 8 :]


def _cut(chance: random.Random, content: bytes, _: Sequence[bytes]) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _delete(chance: random.Random, content: bytes, _: Sequence[bytes]) -> bytes:
    at, count = chance.randrange(len(content) + 1), chance.choice((1, 2, 4, 8, 64))
    return content[:at] + content[at + count :]


def _repeat(chance: random.Random, content: bytes, _: Sequence[bytes]) -> bytes:
    at, count = chance.randrange(len(content) + 1), chance.choice((1, 8, 64, 512))
    return content[:at] + content[at : at + count] * chance.choice((2, 2, 3, 20)) + content[at + count :]


def _insert(chance: random.Random, content: bytes, _: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.choice(TOKENS) + content[at:]


def _splice(chance: random.Random, content: bytes, corpus: Sequence[bytes]) -> bytes:
    other = chance.choice(corpus)
    return content[: chance.randrange(len(content) + 1)] + other[chance.randrange(len(other) + 1) :]


def _structure(chance: random.Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """Of the JSON in it, if there is any: one value replaced, removed, moved or given a second time."""
    start = content.find(b"{")
    if start < 0:
        return content
    try:
        value, end = json.JSONDecoder().raw_decode(content[start:].decode("utf-8"))
    except (ValueError, RecursionError):
        return content
    places = list(_places(value))
    if not places:
        return content
    holder, key = chance.choice(places)
    way = chance.randrange(4)
    if way == 0 and isinstance(holder, dict):
        holder[str(chance.choice(VALUES))[:40]] = holder.pop(key)
    elif way == 1:
        del holder[key]
    elif way == 2:
        other, at = chance.choice(places)
        try:
            holder[key] = other[at]
        except (KeyError, IndexError):
            return content
    else:
        holder[key] = chance.choice(VALUES)
    try:
        text = json.dumps(value).encode("utf-8")
    except (ValueError, RecursionError):  # it has become a part of itself
        return content
    tail = content[start:].decode("utf-8", "replace")[end:].encode("utf-8")
    if start == 8:  # safetensors: the length before it follows
        return struct.pack("<Q", len(text)) + text + tail
    return content[:start] + text + tail


def _places(value: Any) -> Any:
    """(holder, key) of everything inside."""
    pending = [value]
    while pending:
        holder = pending.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                pending.append(holder[key])


WAYS: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    *(_flip, _byte, _number, _step, _cut, _delete, _repeat, _insert, _splice),
    *(_structure, _structure, _structure),
)
