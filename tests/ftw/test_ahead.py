"""An FTW directory that is read ahead: the same weights, read once, and the same sentences where they are not whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ftengine.errors import CheckpointError
from ftengine.experts.load import BankLoader, ExpertShape
from ftengine.models.base import ModelOptions, load
from ftengine.weights import read_ahead
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.ftw import files as ftw_files
from ftengine.weights.ftw.files import FtwFiles
from ftengine.weights.ftw.source import FtwSource
from ftengine.weights.loader import WeightLoader
from ftengine.weights.open import open_files, open_source
from ftengine.weights.ranges import RangeReader
from tests.weights.checkpoints import EXPERTS, HIDDEN, INTERMEDIATE
from tests.weights.test_read_ahead import wait_until

LAYERS = range(2)
SHAPE = ExpertShape(EXPERTS, HIDDEN, INTERMEDIATE)


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ftw_files, "SMALLEST", 1)


def begun(folder: Path, *, dense: bool = True) -> FtwSource:
    files = FtwFiles(folder)
    files.read_ahead(LAYERS, dense=dense)
    return FtwSource(files)


@pytest.fixture
def nothing_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError("read a second time")

    monkeypatch.setattr(RangeReader, "read", read)


def test_the_same_tensors(converted: Path, request: pytest.FixtureRequest) -> None:
    with FtwSource(converted) as plain:
        tensors = {name: plain.plain(name, torch.float32) for name in plain.tensors()}
    request.getfixturevalue("nothing_read_again")
    with begun(converted) as source:
        assert source.tensors().keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(source.plain(name, torch.float32), tensor)


def test_the_same_experts_in_the_memory_that_they_were_read_to(converted: Path, request: pytest.FixtureRequest) -> None:
    with FtwSource(converted) as plain:
        assert WeightLoader(plain).begun_experts(0) is None
        loading = BankLoader(WeightLoader(plain))
        expected = [loading.load(layer, SHAPE) for layer in LAYERS]
        loading.finish()
        loading.close()
    request.getfixturevalue("nothing_read_again")
    progress: list[float] = []
    with begun(converted, dense=False) as source:
        loader = WeightLoader(source, lambda stage, done: progress.append(done))
        loader.expect_experts(len(LAYERS), EXPERTS)
        loading = BankLoader(loader)
        addresses = [source.begun_experts(layer).data_ptr() for layer in LAYERS]
        banks = [loading.load(layer, SHAPE) for layer in LAYERS]
        loading.finish()
        loading.close()
    for bank, other, address in zip(banks, expected, addresses, strict=True):
        assert bank.layout == other.layout
        assert bank.blocks.data_ptr() == address
        assert torch.equal(bank.blocks, other.blocks)
    assert progress == sorted(progress)
    assert len(set(progress)) == len(LAYERS), "a layer counts when it was taken"


def test_other_memory_is_filled_as_before(converted: Path) -> None:
    with begun(converted) as source:
        begun_blocks = source.begun_experts(1)
        own = torch.zeros_like(begun_blocks)
        source.read_experts(1, own)
        source.read_experts(1, begun_blocks)
        assert torch.equal(own, begun_blocks)
        assert source.begun_experts(1) is None


def test_a_layer_of_another_number_of_experts_is_read_by_itself(converted: Path) -> None:
    with begun(converted) as source:
        loading = BankLoader(WeightLoader(source))
        bank = loading.load(0, ExpertShape(EXPERTS - 1, HIDDEN, INTERMEDIATE))
        loading.finish()
        whole = source.begun_experts(0)
        source.read_experts(0, whole)
        assert torch.equal(bank.blocks, whole[:-1])
        loading.load(0, ExpertShape(EXPERTS + 1, HIDDEN, INTERMEDIATE))
        with pytest.raises(CheckpointError, match="has 3 experts in layer 0, 4 are wanted"):
            loading.finish()
        loading.close()


def test_what_the_system_gives_no_memory_for_is_left_to_whoever_asks(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, given = read_ahead.aligned_bytes, []

    def starving(size: int):
        if len(given) == 3:
            raise MemoryError
        given.append(size)
        return real(size)

    monkeypatch.setattr(read_ahead, "aligned_bytes", starving)
    with begun(converted) as source, FtwSource(converted) as plain:
        assert len(given) == 3
        assert source.begun_experts(0) is None
        for name in plain.tensors():
            assert torch.equal(source.plain(name, torch.float32), plain.plain(name, torch.float32))


def test_only_layers_that_are_asked_for(converted: Path) -> None:
    with FtwFiles(converted) as files:
        files.read_ahead([1], dense=False)
        assert [files.ahead(section) is not None for section in files.header.experts] == [False, True]
        assert all(files.ahead(tensor) is None for tensor in files.header.tensors)


def test_a_load_that_is_given_up_does_not_wait_for_what_is_read_ahead(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers are waited for, each of them many steps, and the disk does not answer until the end has begun."""
    real, opened, came, calls = os.preadv, threading.Event(), threading.Event(), []

    def slow(*arguments: object) -> int:
        calls.append(1)
        came.set()
        assert opened.wait(60)
        return real(*arguments)

    monkeypatch.setattr(read_ahead, "STEP_BYTES", 4096)
    monkeypatch.setattr(os, "preadv", slow)
    with begun(converted, dense=False) as source:
        steps = sum(section.extent for section in source.header.experts) // 4096
        loading = BankLoader(WeightLoader(source))
        for layer in LAYERS:
            loading.load(layer, SHAPE)
        assert came.wait(60)
        closing = threading.Thread(target=loading.close)
        closing.start()
        try:
            wait_until(lambda: source._files._ahead._pool._shutdown)
        finally:
            opened.set()
        closing.join(60)
        assert not closing.is_alive()
        assert len(calls) < steps // 2
        assert source.begun_experts(0) is None


def test_closing_again_is_no_error(converted: Path) -> None:
    files = FtwFiles(converted)
    files.read_ahead(LAYERS, dense=True)
    files.close()
    files.close()
    assert files.ahead(files.header.experts[0]) is None


def test_only_ftw_is_opened_without_torch(converted: Path, model: Path) -> None:
    assert open_files(Checkpoint.open(model)) is None
    files = open_files(Checkpoint.open(converted))
    assert files is not None
    with open_source(files) as source:
        assert isinstance(source, FtwSource)
        assert source.tensors() == files.tensors()


@pytest.mark.parametrize("name", ["experts", "dense"])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_file_that_lost_its_end_is_named_by_loading(name: str, ahead: bool, copy: Callable[[str], Path]) -> None:
    """After the header was found sound. The same sentence, read ahead or not."""
    folder = copy("lost")
    files = FtwFiles(folder)
    section = files.header.experts[0] if name == "experts" else max(files.header.tensors, key=lambda each: each.nbytes)
    damaged = folder / files.header.files[section.file].name
    os.truncate(damaged, section.offset + section.extent // 2)
    if ahead:
        files.read_ahead(LAYERS, dense=True)
    with pytest.raises(CheckpointError) as caught:
        load(Checkpoint.open(folder), ModelOptions("float32", source=open_source(files)))
    assert str(caught.value) == f"{damaged} ended while it was read: it changed"
    assert caught.value.next_step == "ft verify"
