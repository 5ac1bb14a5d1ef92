"""WeightLoader over files: packed, stacked and reordered matrices against the tensors that were saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftengine.errors import CheckpointError
from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import BF16, F32, FP8_BLOCK
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.formats.pack import pack, unpack
from ftengine.weights.loader import WeightLoader
from ftengine.weights.open import open_source
from ftengine.weights.stack import Matrix, halves_apart, natural, part, stack


def loader_of(folder: Path, tensors: dict[str, torch.Tensor], seen: list[float] | None = None) -> WeightLoader:
    config = {"architectures": ["X"], "vocab_size": 1, "max_position_embeddings": 1}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return WeightLoader(open_source(folder), lambda _stage, done: None if seen is None else seen.append(done))


def plain(matrix: Matrix) -> torch.Tensor:
    return dequantize(natural(matrix))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_keeps_its_numbers_and_its_format(tmp_path: Path, stored: torch.dtype) -> None:
    tensor = torch.randn(37, 11).to(stored)
    with loader_of(tmp_path, {"x.weight": tensor, "v": tensor[0].clone()}) as loader:
        found = loader.take_packed("x.weight", 37, 11)
        assert found.format.name == {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[str(stored)[6:]]
        assert torch.equal(plain(found), tensor.float())
        assert torch.equal(loader.take("v", 11), tensor[0].float())
        loader.finish()


def test_rows_are_stacked_in_the_order_asked_for(tmp_path: Path) -> None:
    """Neighbours of one format become one matrix, where the upper one ends with a panel."""
    tensors = {
        "a.weight": torch.randn(2, 5),
        "b.weight": torch.randn(32, 5),
        "c.weight": torch.randn(3, 5),
        "d.weight": torch.randn(16, 5).bfloat16(),
    }
    with loader_of(tmp_path, tensors) as loader:
        order = [("b", 32), ("a", 2), ("c", 3), ("d", 16)]
        found = loader.take_rows([(f"{name}.weight", rows) for name, rows in order], 5)
    assert [(matrix.format, matrix.rows) for matrix in found] == [(F32, 34), (F32, 3), (BF16, 16)]
    expected = torch.cat([tensors[f"{name}.weight"].float() for name, _ in order])
    assert torch.equal(torch.cat([plain(matrix) for matrix in found]), expected)


def test_progress_rises_to_one_and_counts_only_what_is_used(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(30), "b": torch.zeros(10), "model.visual.x": torch.zeros(1000)}
    seen: list[float] = []
    with loader_of(tmp_path, tensors, seen) as loader:
        loader.take("a", 30)
        with pytest.raises(CheckpointError, match=r"b has no place"):
            loader.finish()
        loader.take("b", 10)
        loader.finish()
    assert seen == [0.75, 1.0]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """A memory map would end the process here."""
    with loader_of(tmp_path, {"x": torch.zeros(1000)}) as loader:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(500)
        with pytest.raises(CheckpointError, match="ended inside the tensor x"):
            loader.take("x", 1000)


def fp8_blocks(rows: int, columns: int) -> QuantMatrix:
    codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8)
    return QuantMatrix(FP8_BLOCK, rows, columns, codes, torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5)


def matrices(size: int) -> list[QuantMatrix]:
    return [QuantMatrix(F32, 4 * size, 40, torch.randn(4 * size, 40)), fp8_blocks(4 * size, 40)]


@pytest.mark.parametrize("size", [128, 16, 6])
@pytest.mark.parametrize("packing", [False, True])
def test_halves_of_heads_are_put_apart(size: int, packing: bool) -> None:
    """[a0, b0, a1, b1] -> [a0, a1, b0, b1], where heads end with blocks of scales, with panels only, with neither."""
    for matrix in matrices(size):
        expected = torch.cat([dequantize(matrix).view(4, size, 40)[at] for at in (0, 2, 1, 3)])
        found = halves_apart(pack(matrix) if packing else matrix, size)
        assert isinstance(found, PackedMatrix) == (packing and size % (128 if matrix.format is FP8_BLOCK else 16) == 0)
        assert torch.equal(plain(found), expected)
        together = stack([part(found, 0, 2 * size), part(found, 2 * size, 4 * size)])
        assert torch.equal(torch.cat([plain(m) for m in together]), expected)


def test_a_part_of_a_packed_matrix_is_a_view() -> None:
    matrix = pack(QuantMatrix(F32, 48, 7, torch.randn(48, 7)))
    found = part(matrix, 16, 48)
    assert isinstance(found, PackedMatrix)
    assert found.data.data_ptr() == matrix.data.data_ptr() + F32.matrix_bytes(16, 7)
    assert torch.equal(unpack(found).codes, unpack(matrix).codes[16:])
