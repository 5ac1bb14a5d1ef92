"""Every code of every format against its definition, and against gguf's own dequantization."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import BF16, FORMATS, FP8, MXFP4, NVFP4, Q4_0, Q8_0, Codes
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.tables import e4m3, e8m0
from tests.formats import numbers

SHAPES = [(1, 1), (3, 7), (17, 33), (130, 97)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_codes_and_scales_give_what_the_definition_says(name: str, shape: tuple[int, int]) -> None:
    matrix = numbers.random_matrix(FORMATS[name], *shape)
    with np.errstate(all="ignore"):
        expected = numbers.dequantized(matrix)
    np.testing.assert_array_equal(dequantize(matrix).numpy(), expected)


def test_every_byte_of_the_small_formats() -> None:
    """Against tables computed from the bits, and torch's own cast."""
    every = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(e4m3(every).numpy(), numbers.E4M3_TABLE)
    np.testing.assert_array_equal(e8m0(every).numpy(), numbers.E8M0_TABLE)
    np.testing.assert_array_equal(e8m0(every).numpy(), every.view(torch.float8_e8m0fnu).float().numpy())
    assert e8m0(every)[0] == 2.0**-127, "a subnormal float32, not zero"
    ones = torch.full((1, 16), 127, dtype=torch.uint8)
    codes = dequantize(QuantMatrix(MXFP4, 1, 512, every.view(1, -1), ones))
    expected = [number for byte in range(256) for number in (numbers.E2M1[byte & 15], numbers.E2M1[byte >> 4])]
    assert codes[0].tolist() == expected


def test_rows_beyond_one_block_and_16_bit_results() -> None:
    """2,300 rows of BF16 out of FP8: rounded once, from float32."""
    matrix = numbers.random_matrix(FP8, 2300, 5)
    wide = dequantize(matrix)
    assert torch.equal(dequantize(matrix, torch.bfloat16).nan_to_num(), wide.bfloat16().nan_to_num())


@pytest.mark.parametrize("kind", [Q8_0, Q4_0, MXFP4], ids=lambda kind: kind.name)
def test_gguf_dequantizes_the_same(kind) -> None:
    """Codes and scales written as ggml's blocks."""
    matrix = numbers.random_matrix(kind, 5, 96, seed=3)
    if kind is MXFP4:
        matrix.scales.clamp_(1, 250)  # ggml's halved powers of two differ from ours at the ends of the range only
    blocks = [ggml_block(matrix, row, group) for row in range(5) for group in range(3)]
    data = np.frombuffer(b"".join(blocks), np.uint8).reshape(5, -1)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.name.upper()])
    np.testing.assert_array_equal(dequantize(matrix).numpy(), expected)


def ggml_block(matrix: QuantMatrix, row: int, group: int) -> bytes:
    """32 columns as ggml-common.h lays them out: the scale, then codes, nibble j with nibble j + 16."""
    columns = range(32 * group, 32 * group + 32)
    codes = [numbers.code(matrix, row, column) for column in columns]
    if matrix.format.codes is not Codes.INT8:
        codes = [low | high << 4 for low, high in zip(codes[:16], codes[16:], strict=True)]
    scale = matrix.scales[row, group].view(1).view(torch.uint8)
    return bytes([*scale.tolist(), *codes])


def test_nvfp4_multiplies_scale_by_scale() -> None:
    """(code * e4m3) is exact in float32, so one rounding is left; an order that rounds twice would differ."""
    codes, scales = torch.full((1, 8), 0x75, dtype=torch.uint8), torch.tensor([[0x3D]], dtype=torch.uint8)
    second = torch.tensor([1 / 3])
    got = dequantize(QuantMatrix(NVFP4, 1, 16, codes, scales, second))[0, :2]
    exact = torch.tensor([3.0, 6.0], dtype=torch.float64) * 1.625 * second.double()
    assert torch.equal(got, exact.float())


def test_parts_are_the_rows_of_the_whole() -> None:
    for kind in FORMATS.values():
        matrix = numbers.random_matrix(kind, 300, 40)
        part = dequantize(matrix.part(128, 300))
        np.testing.assert_array_equal(part.numpy(), dequantize(matrix)[128:].numpy())
    with pytest.raises(ValueError, match="blocks of 128"):
        numbers.random_matrix(FORMATS["fp8-block"], 300, 40).part(64, 300)
    assert numbers.random_matrix(BF16, 4, 4).part(1, 1).rows == 0
