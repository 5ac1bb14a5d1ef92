"""Trace files: a round trip, files that are none, and `ft bench trace` on them."""

from __future__ import annotations

import contextlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ftengine.errors import FtError
from ftengine.experts.replay import replay
from ftengine.experts.trace import NEAR, encode_trace, load_trace, near_misses, store_trace
from ftlaunch.cli.bench import command

STEPS, LAYERS, EXPERTS, TOP_K = 40, 2, 24, 4


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """As the engine records: exact ids, logits of half precision."""
    logits = 3 * np.random.default_rng(0).standard_normal((STEPS, LAYERS, EXPERTS))
    ids = np.argsort(-logits, -1)[:, :, :TOP_K]
    path = tmp_path / "trace.npz"
    ids_there = ids.astype(np.int16)
    store_trace(path, encode_trace(ids_there, *near_misses(ids_there, logits.astype(np.float16)), EXPERTS))
    return path, ids, logits


def test_round_trip(recorded: tuple[Path, np.ndarray, np.ndarray]) -> None:
    path, ids, logits = recorded
    trace = load_trace(path)
    assert (trace.steps, trace.layers, trace.top_k, trace.experts) == (STEPS, LAYERS, TOP_K, EXPERTS)
    np.testing.assert_array_equal(trace.ids, ids)
    np.testing.assert_array_equal(trace.near[:, :, :TOP_K], ids)
    mass = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = -np.sort(-mass, -1)[:, :, :NEAR]
    np.testing.assert_allclose(trace.probabilities, best, rtol=0.02)
    np.testing.assert_allclose(trace.probabilities, np.take_along_axis(mass, trace.near, -1), rtol=0.02)
    assert [entry.name for entry in path.parent.iterdir()] == ["trace.npz"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_trace_is_not_stored(tmp_path: Path) -> None:
    with pytest.raises(FtError, match="is not a routing trace"):
        store_trace(tmp_path / "trace.npz", b"not a zip file")
    assert list(tmp_path.iterdir()) == []


def test_ids_alone_are_a_trace(tmp_path: Path) -> None:
    ids = np.array([[[0, 3]], [[2, 1]]])
    np.savez(tmp_path / "plain.npz", ids=ids)
    trace = load_trace(tmp_path / "plain.npz")
    assert (trace.experts, trace.near.tolist()) == (4, ids.tolist())
    assert (trace.probabilities == 0.5).all()


IDS = np.broadcast_to(np.array([3, 5], np.int16), (3, 2, 2))
NEXT = np.broadcast_to(np.arange(4, dtype=np.int16), (3, 2, 4))
GOOD = {"ids": IDS, "E": np.int64(8)}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"other": np.zeros(3)}, 'no "ids"'),
        (GOOD | {"ids": IDS[0]}, 'no "ids"'),
        (GOOD | {"ids": IDS.astype(float)}, '"ids" holds values of type float64'),
        (GOOD | {"ids": IDS.astype("m8[s]")}, '"ids" holds values of type'),
        (GOOD | {"ids": IDS.astype(str)}, '"ids" holds values of type'),
        (GOOD | {"ids": np.zeros((3, 2, 2), int)}, '"ids" names an expert twice'),
        (GOOD | {"ids": IDS.astype(np.uint64) + 2**63}, '"ids" names experts outside'),
        ({"ids": IDS.astype(np.int64) + 10**15}, "more than 1000000 experts"),
        (GOOD | {"ids": np.zeros((0, 2, 2), int)}, 'no "ids"'),
        (GOOD | {"ids": np.full((3, 2, 2), 8)}, '"ids" names experts outside 0..7'),
        (GOOD | {"near": np.full((3, 2, 4), -1)}, '"near" names experts outside'),
        (GOOD | {"near": np.zeros((2, 2, 4), int)}, '"near" does not fit'),
        (GOOD | {"nearp": np.zeros((3, 2, 5))}, "do not fit"),
        (GOOD | {"near": np.zeros((3, 2, 4), int)}, '"near" names an expert twice'),
        (GOOD | {"near": NEXT[:, :, :0]}, '"near" does not fit'),
        (GOOD | {"near": NEXT[:, 0]}, '"near" does not fit'),
        (GOOD | {"near": NEXT[:, :, :1]}, '"near" does not fit'),
        (GOOD | {"near": NEXT.astype(complex)}, '"near" holds values of type complex128'),
        (GOOD | {"nearp": np.full((3, 2, 2), np.nan)}, "not a probability"),
        (GOOD | {"nearp": np.full((3, 2, 2), -0.5)}, "not a probability"),
        (GOOD | {"nearp": np.full((3, 2, 2), 1e300)}, "not a probability"),
        (GOOD | {"nearp": np.full((3, 2, 2), 0.5j)}, '"nearp" holds values of type complex128'),
        (GOOD | {"nearp": np.full((3, 2, 2), "0.5")}, '"nearp" holds values of type'),
        (GOOD | {"nearp": np.full((3, 2, 2), 1, np.uint16)}, '"nearp" holds values of type uint16'),
        (GOOD | {"E": np.array([8])}, '"E" is not one positive number'),
        (GOOD | {"E": np.int64(0)}, '"E" is not one positive number'),
        (GOOD | {"E": np.complex128(8)}, '"E" holds values of type complex128'),
        (GOOD | {"E": np.float64("inf")}, '"E" holds values of type float64'),
        (GOOD | {"E": np.int64(10**15)}, "more than 1000000 experts"),
        (GOOD | {"ids": np.array([None], object)}, "is not a routing trace"),
    ],
)
def test_what_is_no_trace_is_refused(parts: dict, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", **parts)
    with pytest.raises(FtError, match=message):
        load_trace(tmp_path / "bad.npz")


def member(header: str, data: bytes = b"") -> bytes:
    """An .npy file, format version 1."""
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def shaped(shape: str) -> bytes:
    return member(f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}, }}")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no array",
        shaped("(3, 2, 2)"),
        shaped("(1000000, 1000000, 1000)"),
        shaped("(-1, 2, 2)"),
        shaped("(10000000000000000000000, 1, 1)"),
        shaped("(3L, 2L, 2L)"),
        member("{'descr': '<i2', 'shape': (("),
        member("(" * 100),
    ],
)
def test_headers_that_lie_are_refused(content: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("ids.npy", content)
    with pytest.raises(FtError, match="is not a routing trace") as caught:
        load_trace(tmp_path / "bad.npz")
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (8, 1, "it is encrypted"),
        (10, 99, "not compressed as"),
        (10, zipfile.ZIP_LZMA, "not compressed as"),
        (27, 0x40, "unpacks to more than 256 MiB"),
    ],
)
def test_archives_of_another_kind_are_refused(offset: int, value: int, message: str, tmp_path: Path) -> None:
    """`offset` of a byte in the entry of the central directory (PKWARE's APPNOTE.TXT, 4.3.12)."""
    np.savez_compressed(tmp_path / "bad.npz", **GOOD)
    content = bytearray((tmp_path / "bad.npz").read_bytes())
    content[content.index(b"PK\x01\x02") + offset] = value
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(FtError, match=message):
        load_trace(tmp_path / "bad.npz")


def test_any_flipped_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "flipped.npz"
    np.savez_compressed(path, near=NEXT, nearp=np.full((3, 2, 4), 128, np.uint8), **GOOD)
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 0xFF
        path.write_bytes(flipped)
        with contextlib.suppress(FtError):
            np.testing.assert_array_equal(load_trace(path).ids, IDS)


def test_damaged_files_are_refused(recorded: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    whole = recorded[0].read_bytes()
    middle = bytearray(whole)
    middle[len(whole) // 2] ^= 0xFF
    for content in (b"", b"PK\x03\x04", whole[: len(whole) // 2], bytes(middle)):
        damaged = tmp_path / "damaged.npz"
        damaged.write_bytes(content)
        with pytest.raises(FtError, match="is not a routing trace"):
            load_trace(damaged)


def test_bench_trace_prints_what_replay_finds(recorded: tuple[Path, np.ndarray, np.ndarray]) -> None:
    arguments = ["trace", str(recorded[0]), "--slots", "25", "--slots", "50", "--policy", "lru", "--policy", "belady"]
    done = CliRunner().invoke(command, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [report[name] for name in ("steps", "layers", "experts", "top_k")] == [STEPS, LAYERS, EXPERTS, TOP_K]
    trace = load_trace(recorded[0])
    for result, (slots, policy) in zip(
        report["results"], [(12, "lru"), (12, "belady"), (24, "lru"), (24, "belady")], strict=True
    ):
        assert (result["slots"], result["policy"]) == (slots, policy)
        assert result["hit_rate"] == replay(trace, slots, policy, warm=STEPS // 4).hit_rate
    named = CliRunner().invoke(command, ["trace", "replay", *arguments[1:], "--json"])
    assert named.stdout == done.stdout
    options_first = CliRunner().invoke(command, ["trace", *arguments[2:], str(recorded[0]), "--json"])
    assert options_first.stdout == done.stdout
    plain = CliRunner().invoke(command, arguments)
    assert plain.exit_code == 0
    assert "12\t25%\t" in plain.stdout
    assert max(map(len, plain.stdout.splitlines())) <= 80
