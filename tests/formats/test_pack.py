"""Panel order: against the layout written out element by element, and native code against torch, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftengine.formats import pack as packing
from ftengine.formats.format import BF16, F16, F32, FORMATS, FP8_BLOCK, ExpertLayout, Format, ScaleKind, padded, panels
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.pack import ExpertBiases, pack, pack_expert, unpack, unpack_expert
from ftengine.formats.panels import write_panels
from tests.formats import numbers

BY_NAME = pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)
NATIVE = pytest.mark.skipif(not packing.NATIVE, reason="the native library is not built")


def bits_at(panel: bytes, kind: Format, row: int, column: int) -> int:
    """The element of a panel, found by format.py's description."""
    per_word = 32 // kind.bits if kind.bits < 32 else 2  # columns of one (b, r)
    b, within = divmod(column, per_word)
    j, p = divmod(within, 2)
    if kind.bits >= 16:
        width = kind.bits // 8
        start = ((b * 16 + row) * 2 + p) * width
        return int.from_bytes(panel[start : start + width], "little")
    start = ((b * 16 + row) * 2 + p) * 2
    word = int.from_bytes(panel[start : start + 2], "little")
    return word >> kind.bits * j & (1 << kind.bits) - 1


def scale_at(scales: bytes, kind: Format, row: int, column: int, columns: int) -> tuple[object, object]:
    """The scale of an element and, for NVFP4, the row's second one."""
    if kind.scales is ScaleKind.ROW:
        return np.frombuffer(scales, np.float32)[row], None
    if kind.scales is ScaleKind.BLOCK128:
        return np.frombuffer(scales, np.float32)[column // 128], None
    if kind.scales is ScaleKind.HALF32:
        return np.frombuffer(scales, np.float16)[column // 32 * 16 + row], None
    if kind.scales is ScaleKind.MX32:
        return scales[column // 32 * 16 + row], None
    second = np.frombuffer(scales[padded(columns) :], np.float32)
    return scales[column // 16 * 16 + row], second[row]


@BY_NAME
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (21, 45), (140, 130)])
def test_every_element_lies_where_the_description_says(kind: Format, shape: tuple[int, int]) -> None:
    matrix = numbers.random_matrix(kind, *shape)
    rows, columns = shape
    data = bytes(pack(matrix).data.tolist())
    size = kind.panel_bytes(columns)
    assert len(data) == kind.matrix_bytes(rows, columns) == panels(rows) * size
    random = np.random.default_rng(0)
    for row, column in zip(random.integers(0, rows, 300), random.integers(0, columns, 300), strict=True):
        panel = data[row // 16 * size : (row // 16 + 1) * size]
        assert bits_at(panel, kind, row % 16, column) == numbers.code(matrix, row, column)
        if kind.scales is ScaleKind.NONE:
            continue
        scales = panel[kind.code_bytes(columns) : kind.code_bytes(columns) + kind.scale_bytes(columns)]
        scale, second = scale_at(scales, kind, row % 16, column, columns)
        assert scale == stored_scale(matrix, row, column)
        assert matrix.row_scales is None or second == matrix.row_scales[row]


def stored_scale(matrix: QuantMatrix, row: int, column: int) -> object:
    kind, scales = matrix.format.scales, matrix.scales
    if kind is ScaleKind.ROW:
        return scales[row]
    if kind is ScaleKind.BLOCK128:
        return scales[row // 128, column // 128]
    return scales[row, column // (16 if kind is ScaleKind.GROUP16 else 32)]


@BY_NAME
def test_rows_and_columns_that_the_matrix_lacks_are_zero(kind: Format) -> None:
    matrix = numbers.random_matrix(kind, 17, 33)
    out = torch.full((kind.matrix_bytes(17, 33),), 0xAA, dtype=torch.uint8)
    second = bytes(pack(matrix, out).data.tolist())[kind.panel_bytes(33) :]
    for column in range(64):
        for row in range(16):
            nibble_kept = kind.bits == 4 and column == 33 and row == 0  # the high half of the last byte
            if (row or column >= 33) and not nibble_kept:
                assert bits_at(second, kind, row, column) == 0
    end = kind.code_bytes(33) + kind.scale_bytes(33)
    assert not any(second[end:]), "up to the next multiple of 64"


@BY_NAME
@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 1 << 30))
def test_unpacking_gives_the_matrix_back(kind: Format, rows: int, columns: int, seed: int) -> None:
    matrix = numbers.random_matrix(kind, rows, columns, seed)
    numbers.assert_same(unpack(pack(matrix)), matrix)


@NATIVE
@BY_NAME
@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 200), columns=st.integers(1, 600), seed=st.integers(0, 1 << 30), data=st.data())
def test_native_and_torch_write_the_same_bytes(kind: Format, rows: int, columns: int, seed: int, data) -> None:
    """Whole matrices, parts of them, every second row, and transposed ones; on one thread and several."""
    matrix = numbers.random_matrix(kind, rows, columns, seed)
    view = data.draw(st.sampled_from(["whole", "part", "alternate", "transposed"]))
    if view == "part" and rows > 128:
        matrix = matrix.part(128, rows)
    elif view == "alternate" and kind is not FP8_BLOCK:
        halves = [tensor if tensor is None else tensor[1::2] for tensor in (matrix.codes, matrix.scales)]
        second = matrix.row_scales if matrix.row_scales is None else matrix.row_scales[1::2].contiguous()
        if kind.scales is ScaleKind.ROW:
            halves[1] = halves[1].contiguous()
        if rows > 1:
            matrix = QuantMatrix(kind, rows // 2, columns, *halves, second)
    elif view == "transposed" and kind in (F32, F16, BF16):
        matrix = QuantMatrix(kind, columns, rows, matrix.codes.T)
    expected = torch.empty(kind.matrix_bytes(matrix.rows, matrix.columns), dtype=torch.uint8)
    write_panels(matrix, expected.view(panels(matrix.rows), -1))
    for threads in (1, 3):
        got = torch.full_like(expected, 0x55)
        assert torch.equal(pack(matrix, got, threads=threads).data, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("formats", ["nvfp4 nvfp4", "mxfp4 bf16", "fp8-block fp8-block", "q4_0 q8_0"])
def test_an_experts_block_holds_its_matrices_where_the_layout_says(formats: str, bias: bool) -> None:
    """Gate and up panels in turn, down, biases: against the same matrices packed alone."""
    layout = ExpertLayout(96, 40, *[FORMATS[name] for name in formats.split()], bias)
    gate, up = (numbers.random_matrix(layout.gate_up, 40, 96, seed) for seed in (1, 2))
    down = numbers.random_matrix(layout.down, 96, 40, 3)
    biases = ExpertBiases(torch.randn(40), torch.randn(40), torch.randn(96)) if bias else None
    block = pack_expert(layout, gate, up, down, biases, torch.full((layout.block_bytes,), 7, dtype=torch.uint8))
    size = layout.gate_up.panel_bytes(96)
    pairs = block[: layout.down_offset].view(-1, 2 * size)
    assert torch.equal(pairs[:, :size].flatten(), pack(gate).data)
    assert torch.equal(pairs[:, size:].flatten(), pack(up).data)
    assert torch.equal(block[layout.down_offset : layout.bias_offset], pack(down).data)
    assert not block[layout.used_bytes :].any()
    assert block.numel() % 4096 == 0
    for found, given_ in zip(unpack_expert(layout, block), (gate, up, down), strict=False):
        numbers.assert_same(found, given_)
    found_biases = unpack_expert(layout, block)[3]
    assert (found_biases is None) == (not bias)
    if found_biases is not None:
        assert torch.equal(found_biases.up, biases.up)
        assert torch.equal(block[layout.bias_offset :].view(torch.float32)[40:80], biases.up)


def test_what_does_not_fit_is_refused() -> None:
    matrix = numbers.random_matrix(BF16, 20, 40)
    size = BF16.matrix_bytes(20, 40)
    for out in (
        torch.empty(size - 1, dtype=torch.uint8),
        torch.empty(size),
        torch.empty(2 * size, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(ValueError, match="contiguous bytes"):
            pack(matrix, out)
    layout = ExpertLayout(40, 20, BF16, BF16)
    with pytest.raises(ValueError, match="expected bf16"):
        pack_expert(layout, matrix, matrix, matrix)
    with pytest.raises(ValueError, match="biases"):
        pack_expert(layout, matrix, matrix, numbers.random_matrix(BF16, 40, 20), ExpertBiases(*[torch.zeros(1)] * 3))


@NATIVE
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "no format 9"),
        ({"rows": 21}, "codes do not have"),
        ({"rows": 0}, "has rows and columns"),
        ({"columns": 41}, "codes do not have"),
        ({"scales": None}, "scales must be given"),
        ({"scales": torch.zeros(20, 3, dtype=torch.uint8)}, "scales must have the shape"),
        ({"scales": torch.zeros(20, 2)}, "wrong dtype"),
        ({"row_scales": torch.zeros(19)}, "row_scales must have"),
        ({"row_scales": None}, "row_scales are nvfp4's"),
        ({"codes": torch.zeros(16, 20, dtype=torch.uint8).T}, "side by side"),
        ({"out": torch.zeros(2, 64, dtype=torch.uint8)}, "out must have the shape"),
        ({"threads": 0}, "threads"),
    ],
)
def test_the_native_door_checks_what_it_is_given(change: dict[str, object], message: str) -> None:
    from ftengine import _native

    kind = FORMATS["nvfp4"]
    matrix = numbers.random_matrix(kind, 20, 32)
    arguments = {
        "format": kind.number,
        "rows": 20,
        "columns": 32,
        "codes": matrix.codes,
        "scales": matrix.scales,
        "row_scales": matrix.row_scales,
        "out": torch.zeros(2, kind.panel_bytes(32), dtype=torch.uint8),
        "threads": 1,
    }
    _native.pack(**arguments)
    with pytest.raises(ValueError, match=message):
        _native.pack(**{**arguments, **change})
