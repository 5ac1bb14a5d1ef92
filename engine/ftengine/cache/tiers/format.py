"""The file of one record: `FTPROMPT`, the header's length and sha256, the header in msgpack, then the content.

The header has the content's sha256, so every bit of the file is covered by a hash or compared. What a file says of
itself is not believed: key, name and sizes must follow from its tokens and the model. Torch-free.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec

from ftengine.cache.tiers.base import CHUNK_TOKENS, TOKEN_BYTES
from ftengine.cache.tiers.hashing import CHUNK_BYTES, KEY_BYTES, anchor_key, chunk_key
from ftengine.cache.tiers.records import Record
from ftengine.cache.tiers.shape import RecordShape
from ftengine.core import BoundaryKind

MAGIC = b"FTPROMPT"
START = struct.Struct("<8sI32s")
VERSION = 1
MAX_HEADER = 1 << 14
NAME = re.compile(r"[0-9a-f]{8}-(chunk|tail)-[0-9a-f]{32}")

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Tokens = Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class BadRecord(Exception):
    """A clause that says what is wrong with a file."""


class Orphan(BadRecord):
    """What it hangs on was removed, or has still to be written by another server."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """identity: the key of what computed it; position: tokens before its end; content: bytes that follow the header."""

    version: int
    identity: str
    key: Key
    parent: Key
    tokens: Tokens
    position: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    kind: BoundaryKind
    session: Annotated[str, msgspec.Meta(max_length=256)]
    side: bool
    lasting: bool
    uses: Count
    saved: Count
    content: Count
    sha256: Digest


@dataclass(frozen=True)
class Opened:
    """header: of a record file; begin: where its content begins."""

    header: Header
    begin: int


def content_bytes(tokens: int, shape: RecordShape) -> int:
    """Of a record with so many tokens of its own."""
    return tokens * shape.token_bytes + (0 if tokens == CHUNK_TOKENS else shape.state_bytes)


def file_name(record: Record) -> str:
    """In the order of names what hangs on a record comes after it."""
    return _name(record.end, record.key, record.length)


def _name(position: int, key: bytes, tokens: int) -> str:
    return f"{position:08x}-{'chunk' if tokens == CHUNK_TOKENS else 'tail'}-{key.hex()}"


def encode(record: Record, identity: str, parts: list[memoryview], *, lasting: bool) -> bytes:
    """What comes before the content."""
    assert record.parent is not None, "the root has no file"
    digest, size = hashlib.sha256(), 0
    for part in parts:
        digest.update(part)
        size += part.nbytes
    worth = record.worth
    header = Header(
        version=VERSION,
        identity=identity,
        key=record.key,
        parent=record.parent.key,
        tokens=record.tokens,
        position=record.end,
        kind=worth.kind,
        session=worth.session,
        side=worth.side,
        lasting=lasting,
        uses=worth.uses,
        saved=worth.saved,
        content=size,
        sha256=digest.digest(),
    )
    raw = msgspec.msgpack.encode(header)
    return START.pack(MAGIC, len(raw), hashlib.sha256(raw).digest()) + raw


def decode(start: bytes, name: str, size: int, identity: str, shape: RecordShape) -> Opened:
    """start: the file's first START.size + MAX_HEADER bytes, or all that it has. Raises BadRecord."""
    if len(start) < START.size:
        raise BadRecord("it is cut short")
    magic, length, digest = START.unpack_from(start)
    if magic != MAGIC:
        raise BadRecord("it is no record")
    raw = start[START.size : START.size + length]
    if length > MAX_HEADER or len(raw) < length or hashlib.sha256(raw).digest() != digest:
        raise BadRecord("its header is damaged")
    try:
        header = msgspec.msgpack.decode(raw, type=Header)
    except msgspec.DecodeError as error:
        raise BadRecord(f"its header is of another version ({error})") from None
    fault = _fault(header, name, identity, shape)
    if fault is None and size != START.size + length + header.content:
        fault = f"it has {size} bytes, its header says {START.size + length + header.content}"
    if fault is not None:
        raise BadRecord(fault)
    return Opened(header, START.size + length)


def _fault(header: Header, name: str, identity: str, shape: RecordShape) -> str | None:
    if header.version != VERSION:
        return f"its format is {header.version}, this one is {VERSION}"
    if header.identity != identity:
        return "another model, template, tokenizer, dtype or version made it"
    tokens, rest = divmod(len(header.tokens), TOKEN_BYTES)
    make_key = chunk_key if tokens == CHUNK_TOKENS else anchor_key
    if rest or header.position % CHUNK_TOKENS != tokens % CHUNK_TOKENS or header.position < tokens:
        return "its tokens do not end where it says"
    if header.key != make_key(header.parent, header.tokens):
        return "its key does not follow from its tokens"
    if name != _name(header.position, header.key, tokens):
        return "it has another record's name"
    if header.content != content_bytes(tokens, shape):
        return f"it has {header.content} bytes of content, its tokens take {content_bytes(tokens, shape)}"
    return None
