"""Safetensors headers: sound ones agree with the format's own library, everything else is a CheckpointError."""

from __future__ import annotations

import json
import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from ftengine.errors import CheckpointError
from ftengine.weights.header import MAX_HEADER_BYTES, read_header


def file_of(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(start: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_entries_agree_with_the_library(tmp_path: Path) -> None:
    """Names, shapes and the very bytes at the offsets, against safetensors' own reader."""
    path = tmp_path / "x.safetensors"
    tensors = {
        "matrix": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
        "empty": numpy.zeros((0, 5), numpy.float16),
        "scalar": numpy.array(7, numpy.int64),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    found, content = read_header(path), path.read_bytes()
    with safe_open(path, "numpy") as reference:
        assert set(found) == set(reference.keys())
        for name in found:
            expected = reference.get_tensor(name)
            assert found[name].shape == expected.shape
            assert content[found[name].start : found[name].end] == expected.tobytes()


HOSTILE: dict[str, tuple[Any, bytes, int | None]] = {
    "length 2^63": ({}, b"", 1 << 63),
    "length past the end": ({}, b"", 3),
    "length over the limit": ({}, b"", MAX_HEADER_BYTES + 1),
    "not UTF-8": (b'{"\xff": 1}', b"", None),
    "NaN": (b'{"a": NaN}', b"", None),
    "a number of many digits": (b'{"a": ' + b"9" * 5000 + b"}", b"", None),
    "nested 10,000 deep": (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", b"", None),
    "a list": (b"[]", b"", None),
    "cut JSON": (b'{"a": ', b"", None),
    "leading space": (b" {}", b"", None),
    "key twice": (b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "a": {}}', b"x", None),
    "key twice inside": (b'{"a": {"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", None),
    "overlap": ({"a": entry(0, 2), "b": entry(1, 3)}, b"xxx", None),
    "the same bytes twice": ({"a": entry(0, 2), "b": entry(0, 2)}, b"xx", None),
    "gap": ({"a": entry(0, 1), "b": entry(2, 3)}, b"xxx", None),
    "gap at the start": ({"a": entry(1, 2)}, b"xx", None),
    "trailing bytes": ({"a": entry(0, 1)}, b"xx", None),
    "data cut short": ({"a": entry(0, 4)}, b"xxx", None),
    "offsets reversed": ({"a": entry(4, 0, shape=[4])}, b"xxxx", None),
    "negative offset": ({"a": entry(-1, 0, shape=[1])}, b"", None),
    "shape times dtype wraps around": ({"a": entry(0, 0, "F32", [1 << 31, 1 << 31, 4])}, b"", None),
    "negative shape": ({"a": entry(0, 1, shape=[-1, -1])}, b"x", None),
    "shape of a boolean": ({"a": entry(0, 1, shape=[True])}, b"x", None),  # type: ignore[list-item]
    "shape of a fraction": ({"a": entry(0, 1, shape=[1.0])}, b"x", None),  # type: ignore[list-item]
    "too many dimensions": ({"a": entry(0, 1, shape=[1] * 9)}, b"x", None),
    "size of another dtype": ({"a": entry(0, 4, "F64", [1])}, b"xxxx", None),
    "half a byte left over": ({"a": entry(0, 1, "F4", [1])}, b"x", None),
    "unknown dtype": ({"a": entry(0, 1, "Q4")}, b"x", None),
    "dtype not text": ({"a": {**entry(0, 1), "dtype": ["U8"]}}, b"x", None),
    "field missing": ({"a": {"dtype": "U8", "shape": [1]}}, b"x", None),
    "field too many": ({"a": {**entry(0, 1), "file": "/etc/passwd"}}, b"x", None),
    "entry not an object": ({"a": 7}, b"", None),
    "name empty": ({"": entry(0, 1)}, b"x", None),
    "name with NUL": ({"a\0b": entry(0, 1)}, b"x", None),
    "name too long": ({"a" * 513: entry(0, 1)}, b"x", None),
    "metadata not text": ({"__metadata__": {"a": 1}}, b"", None),
    "metadata not a map": ({"__metadata__": []}, b"", None),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, fault: str) -> None:
    header, data, length = HOSTILE[fault]
    started = time.process_time()
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        read_header(file_of(tmp_path / "x.safetensors", header, data, length))
    assert time.process_time() - started < 1


@pytest.mark.parametrize("size", range(9))
def test_a_file_that_ends_in_its_first_bytes_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2)[:size] + b"{"[: size - 8 if size > 8 else 0])
    with pytest.raises(CheckpointError):
        read_header(path)


def test_every_truncation_and_every_changed_header_byte_is_seen_or_harmless(tmp_path: Path) -> None:
    """Cut at each byte: refused. One header bit flipped: refused, or the same layout under another name or dtype."""
    path = tmp_path / "x.safetensors"
    save_file({"a": numpy.zeros((3, 4), numpy.float32), "b": numpy.ones(5, numpy.float16)}, path)
    sound, layout = path.read_bytes(), sorted((e.start, e.end) for e in read_header(path).values())
    for size in range(len(sound)):
        path.write_bytes(sound[:size])
        with pytest.raises(CheckpointError):
            read_header(path)
    header_end = 8 + struct.unpack("<Q", sound[:8])[0]
    for bit in random.Random(0).sample(range(header_end * 8), 400):
        changed = bytearray(sound)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            found = read_header(path)
        except CheckpointError:
            continue
        assert sorted((e.start, e.end) for e in found.values()) == layout


@settings(max_examples=300)
@given(raw=st.binary(max_size=200) | st.text('{}[]":,0123456789.eE-+ adtypeshoffU8F32', max_size=200).map(str.encode))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = file_of(tmp_path_factory.getbasetemp() / "fuzz.safetensors", raw)
    try:
        found = read_header(path)
    except CheckpointError:
        return
    assert all(entry.end == entry.start for entry in found.values())  # there was no data
