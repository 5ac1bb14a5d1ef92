"""TensorLoader and TensorReader against safetensors' own reader, and against files that change under them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftengine.errors import CheckpointError
from ftengine.weights import reader
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.loader import TensorLoader


def checkpoint_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    config = {"architectures": ["X"], "vocab_size": 1, "max_position_embeddings": 1}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, to: torch.dtype
) -> None:
    """Read in blocks much smaller than the tensor, against torch's own conversion."""
    monkeypatch.setattr(reader, "STAGING_BYTES", 100)
    tensor = torch.randn(37, 11).to(stored)
    with TensorLoader(checkpoint_of(tmp_path, {"x": tensor, "empty": tensor[:0]}), to, str) as loader:
        assert torch.equal(loader.take("x", 37, 11), tensor.to(to))
        assert loader.take("empty", 0, 11).numel() == 0
        part = torch.empty(3, 11, dtype=to)
        loader.read_part("x", part, 4 * 11)
        assert torch.equal(part, tensor[4:7].to(to))
        with pytest.raises(ValueError, match="no 33 elements"):
            loader.read_part("x", part, 35 * 11)
        loader.finish()


def test_rows_are_stacked_in_the_order_asked_for(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 5), "b": torch.randn(3, 5)}
    with TensorLoader(checkpoint_of(tmp_path, tensors), torch.float32, str) as loader:
        stacked = loader.take_rows([("b", 3), ("a", 2)], 5)
    assert torch.equal(stacked, torch.cat((tensors["b"], tensors["a"])))


def test_progress_rises_to_one_and_counts_only_what_is_used(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(30), "b": torch.zeros(10), "vision": torch.zeros(1000)}
    seen: list[float] = []
    with TensorLoader(
        checkpoint_of(tmp_path, tensors),
        torch.float32,
        lambda name: None if name == "vision" else name,
        lambda _stage, done: seen.append(done),
    ) as loader:
        loader.take("a", 30)
        with pytest.raises(CheckpointError, match=r"b .* no place"):
            loader.finish()
        loader.take("b", 10)
        loader.finish()
    assert seen == [0.75, 1.0]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """A memory map would end the process here."""
    checkpoint = checkpoint_of(tmp_path, {"x": torch.zeros(1000)})
    with TensorLoader(checkpoint, torch.float32, str) as loader:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(500)
        with pytest.raises(CheckpointError, match="ended inside the tensor x"):
            loader.take("x", 1000)
