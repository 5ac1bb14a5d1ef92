"""Products with packed matrices, of every format and version that runs here, against float64 products in torch."""

from __future__ import annotations

import pytest
import torch

from ftengine.formats.format import FORMATS, Format
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.pack import pack
from ftengine.formats.quantize import quantize
from ftengine.kernels import native
from tests.kernels.packed_cases import ALL_FORMATS, DTYPES, activations, assert_close, every_code, product

_native = pytest.importorskip("ftengine._native")
VERSIONS = native.instruction_sets()
SHAPES = ((1, 1), (16, 32), (37, 96), (50, 130), (100, 288))  # rows, columns
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 40)


def run(matrix, x: torch.Tensor, isa: str, threads: int = 1, bias=None, out=None) -> torch.Tensor:
    packed = pack(matrix)
    add = out is not None
    result = torch.full((len(x), matrix.rows), 7.0) if out is None else out
    number = matrix.format.number
    _native.linear_packed(x, packed.data, matrix.rows, matrix.columns, number, result, bias, add, threads, isa)
    return result


@pytest.mark.parametrize("isa", VERSIONS)
@pytest.mark.parametrize("kind", ALL_FORMATS, ids=lambda kind: kind.name)
def test_odd_shapes_and_every_number_of_tokens_equal_float64(kind: Format, isa: str) -> None:
    for dtype in DTYPES:
        for rows, columns in SHAPES:
            matrix = quantize(torch.randn(rows, columns), kind)
            for tokens in TOKENS:
                x = activations(tokens, columns, dtype)
                bias = torch.randn(rows)
                expected, magnitude = product(matrix, x)
                assert_close(run(matrix, x, isa, bias=bias), expected + bias.double(), magnitude + bias.abs())


@pytest.mark.parametrize("isa", VERSIONS)
@pytest.mark.parametrize("kind", ALL_FORMATS, ids=lambda kind: kind.name)
def test_every_code_and_scale_equals_float64(kind: Format, isa: str) -> None:
    for dtype in DTYPES:
        for rows, columns in ((64, 32), (32, 256)):
            matrix = every_code(kind, rows, columns)
            for tokens in (1, 5):
                x = activations(tokens, columns, dtype)
                assert_close(run(matrix, x, isa), *product(matrix, x))


@pytest.mark.parametrize("isa", VERSIONS)
@pytest.mark.parametrize("name", ["fp8", "q8_0", "nvfp4", "mxfp4", "q4_0"])
def test_one_column_at_a_time_gives_the_value_of_each_code(name: str, isa: str) -> None:
    """With a single one among zeros there is no sum to hide behind: a small value must come out as well as a large."""
    matrix = every_code(FORMATS[name], 32, 32)
    for dtype in DTYPES:
        x = torch.eye(32, dtype=dtype)
        expected, _ = product(matrix, x)
        assert torch.allclose(run(matrix, x, isa).double(), expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", VERSIONS)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_scales_of_any_size_keep_their_precision(tokens: int, isa: str) -> None:
    """A row a scale, from 2^-127 on, which float32 has as a subnormal number only."""
    kind, columns = FORMATS["mxfp4"], 64
    for bytes_, size in ((torch.arange(128), 2.0**60), (torch.arange(128, 250), 2.0**-60)):
        rows = len(bytes_)
        codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
        scales = bytes_.to(torch.uint8)[:, None].repeat(1, columns // 32)
        matrix = QuantMatrix(kind, rows, columns, codes, scales, None)
        for dtype in DTYPES:
            x = activations(tokens, columns, dtype) * size
            assert_close(run(matrix, x, isa), *product(matrix, x))


@pytest.mark.parametrize("isa", VERSIONS)
@pytest.mark.parametrize("kind", ALL_FORMATS, ids=lambda kind: kind.name)
def test_the_number_of_threads_changes_no_bit(kind: Format, isa: str) -> None:
    matrix = quantize(torch.randn(300, 160), kind)
    for tokens in (1, 9, 40):
        x = activations(tokens, 160, torch.bfloat16)
        one = run(matrix, x, isa, 1)
        assert all(torch.equal(one, run(matrix, x, isa, threads)) for threads in (2, 3))


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512_bf16"])
@pytest.mark.parametrize("kind", ALL_FORMATS, ids=lambda kind: kind.name)
def test_a_token_does_not_depend_on_its_batch(kind: Format, isa: str) -> None:
    if isa not in VERSIONS:
        pytest.skip(f"this processor has no {isa}")
    matrix = quantize(torch.randn(48, 288), kind)
    for dtype in DTYPES:
        x = activations(21, 288, dtype)
        alone = torch.cat([run(matrix, row, isa) for row in x.split(1)])
        assert torch.equal(run(matrix, x, isa), alone)


@pytest.mark.parametrize("isa", VERSIONS)
def test_nan_and_infinity_reach_their_token_only(isa: str) -> None:
    matrix = quantize(torch.rand(20, 64) + 0.5, FORMATS["mxfp4"])
    for dtype in DTYPES:
        x = activations(4, 64, dtype)
        x[1, 3], x[2, 5] = torch.nan, torch.inf
        found = run(matrix, x, isa)
        assert found[1].isnan().all()
        assert found[2].isposinf().all()
        assert found[[0, 3]].isfinite().all()


def test_adds_to_what_is_there_in_rows_apart() -> None:
    matrix = quantize(torch.randn(20, 64), FORMATS["nvfp4"])
    x, room = activations(3, 64, torch.float32), torch.ones(3, 40)
    run(matrix, x, "", out=room[:, :20])
    expected, magnitude = product(matrix, x)
    assert_close(room[:, :20], expected + 1, magnitude + 1)
    assert (room[:, 20:] == 1).all()


def test_no_tokens_and_no_rows() -> None:
    assert run(quantize(torch.randn(20, 64), FORMATS["bf16"]), torch.zeros(0, 64), "").shape == (0, 20)
    _native.linear_packed(torch.zeros(2, 64), torch.zeros(0, dtype=torch.uint8), 0, 64, 2, torch.zeros(2, 0))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"format": 9}, ValueError, "not the number of a format"),
        ({"rows": -1}, ValueError, "rows must be"),
        ({"columns": 63}, ValueError, "must be zero from column 63"),
        ({"columns": 96}, ValueError, "bytes"),
        ({"x": torch.ones(2, 60)}, ValueError, "rows of 64"),
        ({"x": torch.ones(2, 64, dtype=torch.float16)}, TypeError, "float32 or bfloat16"),
        ({"data": torch.zeros(100, dtype=torch.uint8)}, ValueError, "bytes"),
        ({"out": torch.zeros(2, 19)}, ValueError, "out must be"),
        ({"bias": torch.zeros(19)}, ValueError, "bias must have"),
        ({"threads": 0}, ValueError, "threads"),
        ({"isa": "z80"}, ValueError, "z80"),
    ],
)
def test_bad_arguments_are_refused(change: dict, error: type[Exception], text: str) -> None:
    data = pack(quantize(torch.randn(20, 64), FORMATS["bf16"])).data
    arguments = {
        "x": torch.ones(2, 64),
        "data": data,
        "rows": 20,
        "columns": 64,
        "format": 2,
        "out": torch.zeros(2, 20),
    }
    with pytest.raises(error, match=text):
        _native.linear_packed(**(arguments | change))
