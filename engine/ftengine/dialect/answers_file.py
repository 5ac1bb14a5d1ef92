"""Remembered answers on disk, so that a session which goes on after a restart finds its own words again.

The file holds what users and the model said: it is readable by its owner only, written whole or not at all, and never
larger than LARGEST. It belongs to one template and tokenizer. Anything that does not match, or is not as it was
written, is left alone with a line in the log; the next save replaces it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from pathlib import Path

import msgspec

from ftengine.atomic import write_atomically
from ftengine.dialect.generations import Generated, Generations
from ftengine.private import private_folder

log = logging.getLogger("ftengine.dialect")

LARGEST = 32 << 20  # bytes
_MAGIC = b"ftansw1\n"
_DIGEST = 32
_HEAD = len(_MAGIC) + 2 * _DIGEST  # magic, key, digest of the rest


def save(generations: Generations, path: Path, key: bytes) -> None:
    """key: 32 bytes that stand for template and tokenizer. Never raises."""
    chosen, size = [], _HEAD + 16
    for answer in reversed(list(generations)):
        try:
            raw = msgspec.msgpack.encode(answer)
        except (OverflowError, TypeError, ValueError):  # a number too large for the format
            continue
        size += len(raw) + 8
        if size > LARGEST:
            break
        chosen.append(raw)
    body = msgspec.msgpack.encode(chosen[::-1])
    try:
        raw = _MAGIC + key + hashlib.blake2b(body, digest_size=_DIGEST).digest() + body
        private_folder(path.parent)
        write_atomically(path, raw, mode=0o600, sync=True)
    except OSError as error:
        log.warning("remembered answers could not be written to %s: %s", path, error)


def load(generations: Generations, path: Path, key: bytes, vocab_size: int) -> None:
    """Adds the file's answers, least recently seen first. Never raises."""
    try:
        raw = _read(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        log.warning("remembered answers in %s are ignored: %s", path, error)
        return
    reason = ""
    answers: list[Generated] = []
    if raw[: len(_MAGIC)] != _MAGIC or len(raw) < _HEAD:
        reason = "it is no such file"
    elif raw[len(_MAGIC) : len(_MAGIC) + _DIGEST] != key:
        reason = "they belong to another model's template or tokenizer"
    elif hashlib.blake2b(raw[_HEAD:], digest_size=_DIGEST).digest() != raw[_HEAD - _DIGEST : _HEAD]:
        reason = "it is damaged"
    else:
        try:
            answers = [
                msgspec.msgpack.decode(one, type=Generated)
                for one in msgspec.msgpack.decode(raw[_HEAD:], type=list[bytes])
            ]
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            reason = str(error)[:200]
    if reason:
        log.warning("remembered answers in %s are ignored: %s", path, reason)
    for answer in answers:
        if _sound(answer, vocab_size):
            generations.add(answer)


def _sound(answer: Generated, vocab_size: int) -> bool:
    if not answer.tokens or len(answer.tokens) % 4:
        return False
    tokens = memoryview(answer.tokens).cast("i")
    places = all(
        0 < control.token < len(tokens) and 0 < control.character < len(answer.text) for control in answer.controls
    )
    return places and min(tokens) >= 0 and max(tokens) < vocab_size and -1 <= answer.think_end < len(answer.controls)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > LARGEST:
            raise ValueError("it is no regular file of bounded size")
        return file.read(LARGEST + 1)
