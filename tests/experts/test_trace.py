"""Trace files: a round trip, files that are none, and `ft bench trace` on them."""

from __future__ import annotations

import json
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


GOOD = {"ids": np.zeros((3, 2, 2), np.int16), "E": np.int64(8)}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"other": np.zeros(3)}, 'no "ids"'),
        (GOOD | {"ids": np.zeros((3, 2))}, 'no "ids"'),
        (GOOD | {"ids": np.zeros((0, 2, 2), int)}, 'no "ids"'),
        (GOOD | {"ids": np.full((3, 2, 2), 8)}, '"ids" names experts outside 0..7'),
        (GOOD | {"near": np.full((3, 2, 4), -1)}, '"near" names experts outside'),
        (GOOD | {"near": np.zeros((2, 2, 4), int)}, "do not fit"),
        (GOOD | {"nearp": np.zeros((3, 2, 5))}, "do not fit"),
        (GOOD | {"ids": np.array([None], object)}, "is not a routing trace"),
    ],
)
def test_what_is_no_trace_is_refused(parts: dict, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", **parts)
    with pytest.raises(FtError, match=message):
        load_trace(tmp_path / "bad.npz")


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
