"""The header of a GGUF file, checked as untrusted input before anything is allocated for what it claims.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md - magic, version, counts, key-value pairs, tensor
records, padding, data. Versions 2 and 3, little-endian. Torch-free. Long arrays (a vocabulary) are skipped over and
decoded when they are asked for.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftengine.errors import CheckpointError
from ftengine.weights.files import open_regular
from ftengine.weights.gguf_types import TYPES, GgufType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 32 << 20  # a vocabulary of 260,000 tokens with its merges takes 11 MB
MAX_PAIRS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_ARRAY = 1 << 20  # elements
MAX_KEY_BYTES = 256
MAX_NAME_BYTES = 256
MAX_RANK = 4
MAX_DIMENSION = 1 << 40
MAX_ALIGNMENT = 1 << 16
SMALL_ARRAY = 1 << 12  # numbers decoded at once; layers have one each
STEP = 1 << 20  # bytes read from the file at a time

UINT32, STRING, ARRAY, BOOL = 4, 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
FIXED = {kind: struct.Struct(f"<{code}") for kind, code in SCALARS.items()}
LENGTH = FIXED[10]


@dataclass(frozen=True)
class GgufTensor:
    """shape: slowest dimension first, as torch has it; rows consist of the type's blocks. start, end: in `file`."""

    name: str
    type: GgufType
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class GgufArray:
    """An array as it lies in the header. `values` decodes it."""

    def __init__(self, path: Path, kind: int, count: int, raw: bytes) -> None:
        self._path = path
        self.kind = kind
        self.count = count
        self._raw = raw

    def values(self) -> list[Any]:
        """Raises CheckpointError for text that is not UTF-8."""
        if self.kind != STRING:
            return _numbers(self.kind, self.count, self._raw)
        try:
            return list(self._strings())
        except UnicodeDecodeError:
            raise _damaged(self._path, "an array has text that is not UTF-8") from None

    def _strings(self) -> Iterator[str]:
        raw, position = self._raw, 0
        for _ in range(self.count):
            (length,) = LENGTH.unpack_from(raw, position)
            position += 8 + length
            yield raw[position - length : position].decode("utf-8")


@dataclass(frozen=True)
class GgufHeader:
    """metadata: a bool, int, float, str, list of numbers, or a GgufArray by key."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises CheckpointError for anything the format forbids, and for claims beyond what models have."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        cursor = _Cursor(path, file.fileno())
        if cursor.take(4) != MAGIC:
            raise _damaged(path, "it does not begin with 'GGUF'")
        version = cursor.number(UINT32)
        if version not in VERSIONS:
            raise _damaged(path, f"its version is {version}; 2 and 3 are read (little-endian)")
        tensor_count = cursor.count(MAX_TENSORS, 8 + 4 + 8 + 4 + 8, "tensors")
        pair_count = cursor.count(MAX_PAIRS, 8 + 4 + 1, "metadata pairs")
        metadata = _metadata(cursor, pair_count)
        records = [_record(cursor) for _ in range(tensor_count)]
        return GgufHeader(path, version, metadata, _place(cursor, metadata, records))


class _Cursor:
    """Reads forward through the header; never past the file's end or MAX_HEADER_BYTES."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._buffer = bytearray()
        self.position = 0

    def need(self, count: int) -> None:
        """Makes `count` bytes from the position on available in the buffer."""
        end = self.position + count
        if end <= len(self._buffer):
            return
        if end > self.size:
            raise _damaged(self.path, f"it ends inside its header, which needs {end} bytes of {self.size}")
        if end > MAX_HEADER_BYTES:
            raise _damaged(self.path, f"its header is larger than {MAX_HEADER_BYTES >> 20} MiB")
        while len(self._buffer) < end:
            got = os.pread(self._descriptor, max(STEP, end - len(self._buffer)), len(self._buffer))
            if not got:
                raise _damaged(self.path, "it ended inside its header while it was read")
            self._buffer += got

    def take(self, count: int) -> bytes:
        self.need(count)
        self.position += count
        return bytes(self._buffer[self.position - count : self.position])

    def number(self, kind: int) -> Any:
        layout = FIXED[kind]
        self.need(layout.size)
        (value,) = layout.unpack_from(self._buffer, self.position)
        self.position += layout.size
        return value

    def count(self, limit: int, least_bytes: int, what: str) -> int:
        """A count of things that take at least `least_bytes` each, all of which must fit into the file."""
        value = int(self.number(10))
        if value > limit or value * least_bytes > self.size - self.position:
            raise _damaged(self.path, f"it claims {value} {what}")
        return value

    def text(self, limit: int, what: str) -> str:
        raw = self.take(self.count(limit, 1, f"bytes of {what}"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _damaged(self.path, f"{what} is not UTF-8") from None

    def skip_texts(self, count: int) -> None:
        unpack, position = LENGTH.unpack_from, self.position
        for _ in range(count):
            if position + 8 > len(self._buffer):
                self.position = position
                self.need(8)
            (length,) = unpack(self._buffer, position)
            position += 8 + length
            if position > self.size:
                raise _damaged(self.path, "a text in an array reaches beyond its end")
        self.position = position
        self.need(0)

    def since(self, start: int) -> bytes:
        return bytes(self._buffer[start : self.position])


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text(MAX_KEY_BYTES, "a key")
        if not key or not key.isprintable() or key in metadata:
            raise _damaged(cursor.path, f"the key {key[:64]!r} is empty, unprintable or there twice")
        metadata[key] = _value(cursor, key)
    return metadata


def _value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number(UINT32)
    if kind == STRING:
        return cursor.text(MAX_HEADER_BYTES, key)
    if kind == ARRAY:
        return _array(cursor, key)
    if kind not in SCALARS:
        raise _damaged(cursor.path, f"{key} has the unknown type {kind}")
    value = cursor.number(kind)
    return bool(value) if kind == BOOL else value


def _array(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number(UINT32)
    if kind != STRING and kind not in SCALARS:
        raise _damaged(cursor.path, f"{key} is an array of the type {kind}, which is not read")
    count = cursor.count(MAX_ARRAY, 8 if kind == STRING else FIXED[kind].size, f"elements of {key}")
    start = cursor.position
    if kind == STRING:
        cursor.skip_texts(count)
    else:
        cursor.take(count * FIXED[kind].size)
    raw = cursor.since(start)
    if kind != STRING and count <= SMALL_ARRAY:
        return _numbers(kind, count, raw)
    return GgufArray(cursor.path, kind, count, raw)


def _numbers(kind: int, count: int, raw: bytes) -> list[Any]:
    values = list(struct.unpack(f"<{count}{SCALARS[kind]}", raw))
    return [bool(value) for value in values] if kind == BOOL else values


@dataclass(frozen=True)
class _Record:
    name: str
    type: GgufType
    shape: tuple[int, ...]
    offset: int  # from the start of the data
    nbytes: int


def _record(cursor: _Cursor) -> _Record:
    name = cursor.text(MAX_NAME_BYTES, "a tensor's name")
    if not name or not name.isprintable():
        raise _damaged(cursor.path, f"the tensor name {name[:64]!r} is not acceptable")
    rank = cursor.number(UINT32)
    if not 1 <= rank <= MAX_RANK:
        raise _damaged(cursor.path, f"{name} has {rank} dimensions")
    extents = [int(cursor.number(10)) for _ in range(rank)]
    if not all(1 <= extent <= MAX_DIMENSION for extent in extents):
        raise _damaged(cursor.path, f"{name} has an impossible shape")
    number = cursor.number(UINT32)
    kind = TYPES.get(number)
    if kind is None:
        raise CheckpointError(f"{cursor.path}: the tensor {name} has the type {number}, which is not known")
    if extents[0] % kind.elements:
        raise _damaged(cursor.path, f"rows of {name} do not divide into blocks of {kind.elements}")
    nbytes = math.prod(extents) // kind.elements * kind.bytes
    return _Record(name, kind, tuple(reversed(extents)), int(cursor.number(10)), nbytes)


def _place(cursor: _Cursor, metadata: dict[str, Any], records: list[_Record]) -> dict[str, GgufTensor]:
    """Tensors follow each other in the order of their records, each at the next multiple of the alignment."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _damaged(cursor.path, f"its alignment is {str(alignment)[:40]}")
    start, offset = -(-cursor.position // alignment) * alignment, 0
    tensors: dict[str, GgufTensor] = {}
    for record in records:
        if record.offset != offset:
            raise _damaged(cursor.path, f"{record.name} begins at {record.offset}, not where the one before it ends")
        if record.name in tensors:
            raise _damaged(cursor.path, f"the tensor {record.name} is there twice")
        first = start + offset
        if first + record.nbytes > cursor.size:
            needed = first + record.nbytes
            raise _damaged(cursor.path, f"{record.name} ends at byte {needed}, the file has {cursor.size}")
        tensors[record.name] = GgufTensor(
            record.name, record.type, record.shape, cursor.path, first, first + record.nbytes
        )
        offset = -(-(offset + record.nbytes) // alignment) * alignment
    return tensors


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a sound GGUF file: {reason}")
