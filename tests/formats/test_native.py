"""Native quantizing and dequantizing against plain torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftengine.formats import native
from ftengine.formats.dequantize import dequantize, dequantized_rows
from ftengine.formats.format import FORMATS, Format, ScaleKind
from ftengine.formats.quantize import IN_NATIVE, quantize
from ftengine.formats.reference import quantize_rows
from tests.formats import numbers

pytestmark = pytest.mark.skipif(not native.NATIVE, reason="the native library is not built")
NAME = {"ids": lambda kind: kind.name}
SCALED = [kind for kind in FORMATS.values() if kind.scales is not ScaleKind.NONE]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """NaN of one kind equals NaN of another: which one a product gives is the processor's choice."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left.nan_to_num(1.0).view(torch.int32), right.nan_to_num(1.0).view(torch.int32)
    )


@pytest.mark.parametrize("kind", IN_NATIVE, **NAME)
@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    seed=st.integers(0, 1 << 30),
    exponent=st.integers(-150, 120),
    spread=st.sampled_from([0.0, 3.0, 20.0]),
    threads=st.sampled_from([1, 2]),
)
def test_codes_and_scales_are_those_of_torch(
    kind: Format, rows: int, columns: int, seed: int, exponent: int, spread: float, threads: int
) -> None:
    """From subnormal numbers to huge ones, groups of very different size, zeros, ties."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=random) * torch.exp(spread * torch.randn(rows, 1, generator=random))
    values = torch.ldexp((values * 4).round() / 4 if seed % 2 else values, torch.tensor(exponent))
    values[torch.rand(rows, columns, generator=random) < 0.1] = 0.0
    values = values.clamp(-1e38, 1e38)
    matrix = quantize(values, kind, threads=threads)
    second = matrix.row_scales[0] if matrix.row_scales is not None else torch.tensor(0.0)
    codes, scales = quantize_rows(values, kind, second)
    assert torch.equal(matrix.codes, codes)
    assert torch.equal(matrix.scales, scales)


@pytest.mark.parametrize("kind", SCALED, **NAME)
@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 1 << 30))
def test_numbers_are_those_of_torch(kind: Format, rows: int, columns: int, seed: int) -> None:
    matrix = numbers.random_matrix(kind, rows, columns, seed)
    assert same_bits(dequantize(matrix, threads=2), dequantized_rows(matrix, 0, rows))


def test_every_float16_scale() -> None:
    scales = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16).view(-1, 1)
    matrix = numbers.QuantMatrix(FORMATS["q8_0"], 1 << 16, 1, torch.ones(1 << 16, 1, dtype=torch.int8), scales)
    assert same_bits(dequantize(matrix), scales.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 7}, "format 7 is not quantized here"),
        ({"codes": torch.zeros(20, 17, dtype=torch.uint8)}, "codes do not have"),
        ({"scales": torch.zeros(20, 1, dtype=torch.uint8)}, "scales must have the shape"),
        ({"scales": torch.zeros(20, 2)}, "wrong dtype"),
        ({"threads": 0}, "threads"),
    ],
)
def test_the_door_checks_what_it_is_given(change: dict[str, object], message: str) -> None:
    from ftengine import _native

    arguments = {
        "format": 5,
        "values": torch.ones(20, 32),
        "second": 1.0,
        "codes": torch.zeros(20, 16, dtype=torch.uint8),
        "scales": torch.zeros(20, 2, dtype=torch.uint8),
        "threads": 1,
    }
    _native.quantize(**arguments)
    with pytest.raises(ValueError, match=message):
        _native.quantize(**{**arguments, **change})
    with pytest.raises(TypeError):
        _native.quantize(**{**arguments, "values": torch.ones(20, 32, dtype=torch.float64)})
