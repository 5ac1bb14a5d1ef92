"""TensorReader against safetensors' own reader, and against files that change under it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftengine.errors import CheckpointError
from ftengine.weights import reader
from ftengine.weights.header import TensorEntry, read_header
from ftengine.weights.reader import TensorReader


def entry_of(folder: Path, tensor: torch.Tensor) -> TensorEntry:
    save_file({"a": torch.zeros(3), "x": tensor}, folder / "model.safetensors")
    return read_header(folder / "model.safetensors")["x"]


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, to: torch.dtype
) -> None:
    """Read in blocks much smaller than the tensor, against torch's own conversion."""
    monkeypatch.setattr(reader, "STAGING_BYTES", 100)
    tensor = torch.randn(37, 11).to(stored)
    entry = entry_of(tmp_path, tensor)
    with TensorReader() as source:
        out = torch.empty(37, 11, dtype=to)
        source.read(entry, out)
        assert torch.equal(out, tensor.to(to))
        part = torch.empty(3, 11, dtype=to)
        source.read(entry, part, 4 * 11)
        assert torch.equal(part, tensor[4:7].to(to))
        with pytest.raises(ValueError, match="no 33 elements"):
            source.read(entry, part, 35 * 11)


def test_a_file_that_shrinks_or_goes_is_an_error(tmp_path: Path) -> None:
    """A memory map would end the process at the first one."""
    entry = entry_of(tmp_path, torch.zeros(1000))
    with TensorReader() as source:
        with entry.file.open("r+b") as file:
            file.truncate(500)
        with pytest.raises(CheckpointError, match="ended inside the tensor x"):
            source.read(entry, torch.empty(1000))
    entry.file.unlink()
    with TensorReader() as source, pytest.raises(CheckpointError, match="cannot be opened"):
        source.read(entry, torch.empty(1000))
