"""What changes the key of the disk tier's folder, and what `ft cache` is told of it."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ftengine.cache.tiers.identity import Identity, identify, weights_hash
from ftengine.cache.tiers.survey import clear, survey
from ftengine.core import BoundaryKind
from tests.cache.tiers.device import ATTENTION, HYBRID, IDENTITY, open_bench, prompt


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "tokenizer.json").write_text("{}")
    chance = np.random.default_rng(0)
    for number in range(2):
        save_file({"w": chance.random((300, 1000), np.float32)}, folder / f"model-{number}.safetensors")
    return folder


def identity(model: Path, **changed: object) -> Identity:
    known = {
        "name": "m",
        "dtype": "float32",
        "device": "cpu",
        "layout": HYBRID,
        "page_size": 16,
        "template": "t",
        "tokenizer": model / "tokenizer.json",
    }
    return identify(model, **{**known, **changed})


def test_everything_that_matters_changes_the_key(model: Path) -> None:
    own = identity(model)
    assert identity(model) == own
    assert identity(model, name="another name").key == own.key
    for change in (
        {"dtype": "bfloat16"},
        {"device": "cuda"},
        {"layout": ATTENTION},
        {"page_size": 32},
        {"template": "u"},
        {"template": None},
        {"tokenizer": b"{ }"},
    ):
        assert identity(model, **change).key != own.key, change


def test_a_copy_is_the_same_model(model: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    assert weights_hash(tmp_path / "copy") == weights_hash(model)


def test_other_weights(model: Path) -> None:
    """Training, merging or quantizing changes most of the bytes."""
    before = weights_hash(model)
    save_file({"w": np.random.default_rng(5).random((300, 1000), np.float32)}, model / "model-1.safetensors")
    assert weights_hash(model) != before


@pytest.mark.parametrize("change", ["config", "metadata", "size", "name", "last byte"])
def test_small_changes(change: str, model: Path) -> None:
    before, shard = weights_hash(model), model / "model-1.safetensors"
    if change == "config":
        (model / "config.json").write_text('{"a": 2}')
    elif change == "metadata":
        save_file({"v": np.random.default_rng(0).random((300, 1000), np.float32)}, shard)
    elif change == "size":
        with shard.open("ab") as file:
            file.write(b"x")
    elif change == "name":
        shard.rename(model / "model-2.safetensors")
    else:
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    assert weights_hash(model) != before


def test_recorded_hashes_count(model: Path, tmp_path: Path) -> None:
    """The store's record, and the Hub's cache, where a file's name is its hash."""
    before = weights_hash(model)
    for value in ("a" * 64, "b" * 64):
        record = {"format": 2, "files": {"model-0.safetensors": {"size": 1, "sha256": value}}}
        (model / "ft-model.json").write_text(json.dumps(record))
        assert weights_hash(model) != before
        before = weights_hash(model)
    (model / "ft-model.json").write_text("not JSON")
    before = weights_hash(model)
    (model / "model-0.safetensors").rename(tmp_path / ("c" * 64))
    (model / "model-0.safetensors").symlink_to(tmp_path / ("c" * 64))
    assert weights_hash(model) != before


def test_ftw_and_gguf(tmp_path: Path) -> None:
    """An FTW directory's header has the hash of every section; of a GGUF file the header and samples count."""
    folder = tmp_path / "ftw"
    folder.mkdir()
    (folder / "ftw.json").write_text("header")
    (folder / "dense.ftw").write_bytes(b"x" * 4096)
    before = weights_hash(folder)
    (folder / "ftw.json").write_text("Header")
    assert weights_hash(folder) != before
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF" + os.urandom(10_000))
    first = tmp_path / "m-00001-of-00002.gguf"
    before = weights_hash(first)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert weights_hash(first) == before
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"GGUF" + os.urandom(10_000))
    assert weights_hash(first) != before


def test_twenty_gigabytes_in_a_moment(tmp_path: Path) -> None:
    """Sparse files of that size; their headers are not sound, which is the loader's concern."""
    (tmp_path / "config.json").write_text("{}")
    for number in range(5):
        path = tmp_path / f"model-{number}.safetensors"
        path.write_bytes(struct.pack("<Q", 100_000))
        os.truncate(path, 4 << 30)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        weights_hash(tmp_path)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.3


def test_survey_and_clear(tmp_path: Path) -> None:
    import msgspec

    other = msgspec.structs.replace(IDENTITY, model="other", weights="x")
    for each, sessions in ((IDENTITY, "ab"), (other, "a")):
        bench = open_bench(HYBRID, 1 << 20, 1 << 20, tmp_path, each)
        for number, name in enumerate(sessions):
            bench.keep(prompt(600, number), BoundaryKind.SYSTEM, session=name)
        bench.close()
    (tmp_path / "mine.txt").write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("x")
    (tmp_path / ("0" * 32)).symlink_to(outside)
    found = {kept.identity.model: kept for kept in survey(tmp_path) if kept.identity is not None}
    assert set(found) == {"model", "other"}
    assert (found["model"].records, found["model"].sessions) == (4, 2)
    assert (found["other"].records, found["other"].sessions) == (2, 1)
    real = sum(path.stat().st_size for path in (tmp_path / IDENTITY.key).iterdir())
    assert found["model"].bytes == real
    assert time.time() - 60 < found["model"].made <= found["model"].used <= time.time() + 1
    assert clear(tmp_path, {IDENTITY.key}) == real
    assert [kept.key for kept in survey(tmp_path)] == [other.key]
    clear(tmp_path)
    assert survey(tmp_path) == []
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (outside / "x").read_text() == "x"
    assert survey(tmp_path / "absent") == []
    assert clear(tmp_path / "absent") == 0
