"""Quantizing against gguf's own, against a search for the nearest number, and against the formats' scale rules."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftengine.errors import CheckpointError
from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import BF16, F16, F32, FORMATS, FP8, FP8_BLOCK, MXFP4, NVFP4, Q4_0, Q8_0, Format
from ftengine.formats.quantize import quantize
from ftengine.formats.tables import nearest_e2m1
from tests.formats import numbers
from tests.formats.test_dequantize import ggml_block

SCALED = [kind for kind in FORMATS.values() if kind not in (F32, F16, BF16)]


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, 1, generator=random).exp()  # rows of different size, a few outliers
    values = torch.randn(rows, columns, generator=random) * sizes
    values[torch.rand(rows, columns, generator=random) < 0.01] *= 20
    return values


def test_the_nearest_e2m1_is_found_and_ties_are_even() -> None:
    """Against a search in float64 over the eight magnitudes, at ties, their neighbours and beyond the range."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.cat(
        (ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(9.0)), torch.rand(500) * 8)
    )
    values = torch.cat((values, -values, torch.tensor([0.0, -0.0, 1e30, -1e30])))
    grid = np.array(numbers.E2M1[:8])
    for value, found in zip(values.tolist(), nearest_e2m1(values).tolist(), strict=True):
        distance = np.abs(grid - min(abs(value), 6.0))
        nearest = np.flatnonzero(distance == distance.min())
        expected = next(code for code in nearest if len(nearest) == 1 or code % 2 == 0)
        assert found & 7 == expected, value
        assert found >> 3 == (np.signbit(value)), value


def test_fp8_is_the_nearest_number_at_its_rows_or_blocks_scale() -> None:
    """Against a search over all 254 numbers of e4m3; scales are amax / 448."""
    table = torch.from_numpy(numbers.E4M3_TABLE[~np.isnan(numbers.E4M3_TABLE)]).double()
    values = weights(140, 150)
    for kind in (FP8, FP8_BLOCK):
        matrix = quantize(values, kind)
        if kind is FP8:
            scale = (values.abs().amax(1, keepdim=True) / 448).expand_as(values)
            assert torch.equal(matrix.scales, scale[:, 0])
        else:
            blocks = [[values[r : r + 128, c : c + 128].abs().amax() / 448 for c in (0, 128)] for r in (0, 128)]
            assert torch.equal(matrix.scales, torch.tensor(blocks))
            scale = matrix.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:140, :150]
        wanted = (values / scale).double()
        least = torch.stack([(wanted - number).abs() for number in table]).amin(0)
        got = torch.from_numpy(numbers.E4M3_TABLE)[matrix.codes.int()].double()
        assert torch.equal((got - wanted).abs(), least)


def test_nvfp4_has_modelopts_scales() -> None:
    """Second scale amax / (6 * 448); a group's is its amax / (6 * second), as e4m3; each code the nearest at those."""
    values = weights(20, 64)
    matrix = quantize(values, NVFP4)
    second = values.abs().amax() / (6 * 448)
    assert torch.equal(matrix.row_scales, second.expand(20))
    groups = values.view(20, 4, 16)
    wanted = (groups.abs().amax(2) / (6 * second)).to(torch.float8_e4m3fn)
    assert torch.equal(matrix.scales, wanted.view(torch.uint8))
    step = (wanted.float() * second)[..., None].double()
    distances = torch.stack([(groups.double() / step - number).abs() for number in numbers.E2M1]).amin(0)
    got = dequantize(matrix).view(20, 4, 16).double() / step
    assert torch.allclose((got - groups.double() / step).abs(), distances, atol=1e-6)


def test_mxfp4_has_the_largest_power_of_two_that_ocp_names() -> None:
    """OCP MX 1.0, 6.3: floor(log2(amax)) less the largest exponent of an element, 2."""
    values = weights(20, 96)
    amax = values.view(20, 3, 32).abs().amax(2).double()
    assert torch.equal(quantize(values, MXFP4).scales.double(), amax.log2().floor() - 2 + 127)
    exact = torch.tensor([[6.0, -0.5, 4.0, 0.0] * 8]) * 2.0**-30
    assert torch.equal(dequantize(quantize(exact, MXFP4)), exact)


@pytest.mark.parametrize("kind", [Q8_0, Q4_0], ids=lambda kind: kind.name)
def test_gguf_quantizes_the_same(kind: Format) -> None:
    """Bit for bit; rows of zeros and of one sign too."""
    values = weights(40, 128)
    values[3], values[4] = 0, values[4].abs()
    matrix = quantize(values, kind)
    expected = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind.name.upper()])
    got = [b"".join(ggml_block(matrix, row, group) for group in range(4)) for row in range(40)]
    assert got == [row.tobytes() for row in expected]


@pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)
@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 40), columns=st.integers(1, 150), size=st.sampled_from([1e-30, 1e-3, 1.0, 100.0]))
def test_what_is_stored_is_near_what_was_given(kind: Format, rows: int, columns: int, size: float) -> None:
    """Any shape and size. Bounds: half a step of a code at the largest value, over the smallest a group can have."""
    values = weights(rows, columns) * size
    if size == 1e-30 and kind in (F16, Q8_0, Q4_0):
        return  # float16 holds nothing this small
    stored = dequantize(quantize(values, kind))
    assert stored.shape == values.shape
    bound = {32: 0.0, 16: 2.0**-8, 8: 0.07, 4: 0.36}[kind.bits]
    assert (stored - values).norm() <= bound * values.norm()


@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.name)
def test_zeros_stay_zeros_and_what_is_not_finite_is_refused(kind: Format) -> None:
    assert torch.equal(dequantize(quantize(torch.zeros(17, 40), kind)), torch.zeros(17, 40))
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(3, 5)
        values[2, 4] = bad
        with pytest.raises(CheckpointError, match=f"x holds NaN or infinity, which {kind.name} cannot"):
            quantize(values, kind, "x")


def test_a_group_far_below_the_largest_value_becomes_zero_not_nan() -> None:
    values = torch.ones(1, 32)
    values[0, 16:] = 1e-9
    assert torch.equal(dequantize(quantize(values, NVFP4))[0, 16:], torch.zeros(16))


@pytest.mark.parametrize("kind", [F16, Q8_0, Q4_0], ids=lambda kind: kind.name)
def test_numbers_beyond_float16_are_refused_not_made_infinite(kind: Format) -> None:
    values = torch.full((2, 32), 1e8)
    with pytest.raises(CheckpointError, match=f"x holds numbers too large for {kind.name}"):
        quantize(values, kind, "x")
