"""Matrices that go to the device are, bit for bit, those that `formats.pack.unpack` reads from the same bytes."""

from __future__ import annotations

import pytest
import torch

from ftengine.experts.pool import ExpertBank
from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import BF16, F32, FORMATS, FP8_BLOCK, NVFP4, ExpertLayout, Format
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.pack import ExpertBiases, pack, pack_expert, unpack
from ftengine.formats.quantize import quantize
from ftengine.kernels.triton.linear import upload, upload_swiglu


def random_matrix(kind: Format, rows: int, columns: int) -> QuantMatrix:
    return quantize(torch.randn(rows, columns), kind)


def assert_same(found: QuantMatrix, expected: QuantMatrix) -> None:
    assert (found.format, found.rows, found.columns) == (expected.format, expected.rows, expected.columns)
    for name in ("codes", "scales", "row_scales"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize(("rows", "columns"), [(300, 100), (16, 32), (1, 7)])
@pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)
def test_chunks_make_the_whole(
    kind: Format, rows: int, columns: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftengine.kernels.triton.upload.CHUNK_BYTES", 1)  # 128 rows at a time
    packed = pack(random_matrix(kind, rows, columns))
    assert_same(upload((packed,), device)[0], unpack(packed))


def test_neighbours_of_one_format_become_one_matrix(device: str) -> None:
    hosts = [random_matrix(NVFP4, 40, 64), random_matrix(NVFP4, 3, 64), random_matrix(BF16, 5, 64)]
    found = upload(tuple(pack(host) for host in hosts), device)
    assert [(part.format, part.rows) for part in found] == [(NVFP4, 43), (BF16, 5)]
    assert torch.equal(found[0].codes.cpu(), torch.cat((hosts[0].codes, hosts[1].codes)))
    assert torch.equal(found[0].row_scales.cpu(), torch.cat((hosts[0].row_scales, hosts[1].row_scales)))


def test_blocks_of_scales_are_joined_only_where_they_end(device: str) -> None:
    hosts = [random_matrix(FP8_BLOCK, rows, 64) for rows in (256, 100, 128)]
    found = upload(tuple(pack(host) for host in hosts), device)
    assert [part.rows for part in found] == [356, 128]
    for part, expected in zip(found, (hosts[:2], hosts[2:]), strict=True):
        assert torch.equal(dequantize(to_host(part)), torch.cat([dequantize(host) for host in expected]))


@pytest.mark.parametrize("kind", [BF16, NVFP4, FP8_BLOCK], ids=lambda kind: kind.name)
@pytest.mark.parametrize("intermediate", [128, 40])
def test_a_shared_expert(kind: Format, intermediate: int, device: str) -> None:
    layout = ExpertLayout(64, intermediate, kind, BF16)
    sides = [random_matrix(kind, intermediate, 64) for _ in range(2)]
    down = random_matrix(BF16, 64, intermediate)
    bank = ExpertBank(layout, pack_expert(layout, *sides, down)[None])
    found = upload_swiglu(bank, device)
    assert found.intermediate == intermediate
    assert found.gate_up.format is (F32 if kind is FP8_BLOCK and intermediate % 128 else kind)
    assert torch.equal(dequantize(to_host(found.gate_up)), torch.cat([dequantize(side) for side in sides]))
    assert_same(found.down, down)


def test_biases_of_a_shared_expert_are_refused(device: str) -> None:
    layout = ExpertLayout(32, 16, BF16, BF16, bias=True)
    sides = [random_matrix(BF16, 16, 32) for _ in range(2)]
    biases = ExpertBiases(torch.zeros(16), torch.zeros(16), torch.zeros(32))
    bank = ExpertBank(layout, pack_expert(layout, *sides, random_matrix(BF16, 32, 16), biases)[None])
    with pytest.raises(ValueError, match="biases"):
        upload_swiglu(bank, device)


def to_host(matrix: QuantMatrix) -> QuantMatrix:
    scales, second = (None if part is None else part.cpu() for part in (matrix.scales, matrix.row_scales))
    return QuantMatrix(matrix.format, matrix.rows, matrix.columns, matrix.codes.cpu(), scales, second)
