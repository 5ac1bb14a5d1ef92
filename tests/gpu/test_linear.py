"""The GPU's dense products against float64 in torch, on the numbers that `formats.dequantize` says the weights are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import BF16, F16, F32, FORMATS, FP8, FP8_BLOCK, NVFP4, Format
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.pack import pack
from ftengine.formats.quantize import quantize
from ftengine.kernels.triton.gemv import gemv_candidates, launch_gemv
from ftengine.kernels.triton.linear import embed, linear, linear_large, rms_norm, stack, swiglu_act, upload
from ftengine.kernels.triton.skinny import launch_skinny, skinny_candidates

CLOSE = 2e-6  # of the largest result: products are exact whatever the activations' type, sums are float32
ROUNDED = 2**-7  # of the largest result: Triton's interpreter cuts off where a GPU rounds to bfloat16
ALL = sorted(FORMATS.values(), key=lambda kind: kind.number)


def matrix(kind: Format, rows: int, columns: int, device: str) -> tuple[QuantMatrix, torch.Tensor]:
    """On the device, and what it is in float64."""
    host = quantize(torch.randn(rows, columns) * 0.1, kind)
    return upload((pack(host),), device)[0], dequantize(host).double()


def assert_close(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    assert found.shape == expected.shape
    assert (found.double().cpu() - expected.cpu()).abs().max() <= share * expected.abs().max()


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_a_product_of_every_format(kind: Format, tokens: int, act: torch.dtype, device: str) -> None:
    """77 rows: no tile's multiple. 200 columns: blocks and groups that are not full."""
    weights, numbers = matrix(kind, 77, 200, device)
    x = torch.randn(tokens, 200).to(act)
    out = torch.full((tokens, 77), 3.0, device=device)
    linear((weights,), x.to(device), out, act=act)
    assert_close(out, x.double() @ numbers.T, CLOSE)


@pytest.mark.parametrize("tokens", [1, 2, 8, 16])
@pytest.mark.parametrize("kind", [BF16, NVFP4, FP8_BLOCK], ids=lambda kind: kind.name)
def test_norm_bias_gate_and_sum_in_one_call(kind: Format, tokens: int, device: str) -> None:
    weights, numbers = matrix(kind, 130, 96, device)
    residual, factor, before = torch.randn(tokens, 96), torch.rand(96), torch.randn(tokens, 140)
    bias, scale = torch.randn(130), torch.rand(tokens)
    out = before.to(device, copy=True)
    normalized = torch.empty(tokens, 96, dtype=torch.bfloat16, device=device)
    linear(
        (weights,),
        residual.to(device),
        out[:, :130],
        norm=(factor.to(device), 1e-5),
        bias=bias.to(device),
        add=True,
        normalized=normalized,
        scale=scale.to(device),
    )
    exact = F.rms_norm(residual.double(), (96,), factor.double(), 1e-5)
    assert_close(normalized, exact, ROUNDED)
    product = normalized.double().cpu() @ numbers.T + bias
    assert_close(out[:, :130], before[:, :130] + product * scale[:, None], CLOSE)
    assert torch.equal(out[:, 130:].cpu(), before[:, 130:])


@pytest.mark.parametrize("columns", [1, 33, 150])
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_columns_that_fill_no_group(kind: Format, columns: int, device: str) -> None:
    weights, numbers = matrix(kind, 5, columns, device)
    x = torch.randn(2, columns)
    for tokens in (1, 2):
        out = torch.empty(tokens, 5, device=device)
        linear((weights,), x[:tokens].to(device), out, act=torch.float32)
        assert_close(out, x[:tokens].double() @ numbers.T, CLOSE)


@pytest.mark.parametrize("tokens", [1, 4])
def test_parts_of_several_formats(tokens: int, device: str) -> None:
    found = [matrix(kind, rows, 64, device) for kind, rows in ((BF16, 9), (BF16, 30), (NVFP4, 48), (F32, 1))]
    parts = stack(tuple(weights for weights, _ in found))
    assert [(part.format, part.rows) for part in parts] == [(BF16, 39), (NVFP4, 48), (F32, 1)]
    numbers = torch.cat([one for _, one in found])
    residual, factor, bias = torch.randn(tokens, 64), torch.rand(64), torch.randn(88)
    normalized = torch.empty(tokens, 64, dtype=torch.bfloat16, device=device)
    out = torch.empty(tokens, 88, device=device)
    norm = (factor.to(device), 1e-6)
    linear(parts, residual.to(device), out, norm=norm, bias=bias.to(device), normalized=normalized)
    assert_close(out, normalized.double().cpu() @ numbers.T + bias, CLOSE)


@pytest.mark.parametrize(
    ("kind", "columns"),
    [(BF16, 2500), (BF16, 640), (FP8, 640), (FP8_BLOCK, 640), (NVFP4, 640)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_candidate_of_the_tuner(kind: Format, columns: int, device: str) -> None:
    weights, numbers = matrix(kind, 40, columns, device)
    x = torch.randn(2, columns).bfloat16()
    expected = x.double() @ numbers.T
    for config in gemv_candidates(kind, columns):
        out = torch.empty(1, 40, device=device)
        launch_gemv(weights, x[:1].to(device), out, config)
        assert_close(out, expected[:1], CLOSE)
    for config in skinny_candidates(kind, 1 << 20, torch.bfloat16):
        out = torch.empty(2, 40, device=device)
        launch_skinny(weights, x.to(device), out, config)
        assert_close(out, expected, CLOSE)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_captured_product(tokens: int, device: str) -> None:
    if device == "cpu":
        pytest.skip("graphs are captured on a GPU only")
    weights, numbers = matrix(BF16, 300, 512, device)
    residual, factor = torch.zeros(tokens, 512, device=device), torch.rand(512, device=device)
    out = torch.zeros(tokens, 300, device=device)
    linear((weights,), residual, out, norm=(factor, 1e-6), add=True)  # compiles; adds zeros
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear((weights,), residual, out, norm=(factor, 1e-6), add=True)
    residual.normal_()
    graph.replay()
    normal = torch.empty(tokens, 512, dtype=torch.bfloat16, device=device)
    rms_norm(residual, factor, 1e-6, normal)
    assert_close(out, normal.double().cpu() @ numbers.T, CLOSE)


@pytest.mark.parametrize("tokens", [1, 8])
def test_equal_inputs_give_equal_bits(tokens: int, device: str) -> None:
    weights, _ = matrix(BF16, 300, 512, device)
    x = torch.randn(tokens, 512).bfloat16().to(device)
    first, second = torch.empty(tokens, 300, device=device), torch.empty(tokens, 300, device=device)
    linear((weights,), x, first)
    linear((weights,), x, second)
    assert torch.equal(first, second)


def test_a_row_longer_than_one_program_holds(device: str) -> None:
    weights, numbers = matrix(BF16, 3, (1 << 14) + 32, device)
    residual, factor = torch.randn(1, weights.columns), torch.rand(weights.columns)
    normalized = torch.empty(1, weights.columns, dtype=torch.bfloat16, device=device)
    out = torch.empty(1, 3, device=device)
    linear((weights,), residual.to(device), out, norm=(factor.to(device), 1e-6), normalized=normalized)
    # Of K partial sums, none larger than the result by much, each is cut off (tensor cores) at 2^-23 of itself: errors
    # that point anywhere add up to sqrt(K) of that.
    assert_close(out, normalized.double().cpu() @ numbers.T, weights.columns**0.5 * 2**-23)


def test_more_rows_than_decode_takes_are_refused(device: str) -> None:
    weights, _ = matrix(F32, 4, 32, device)
    with pytest.raises(ValueError, match="linear_large"):
        linear((weights,), torch.zeros(17, 32, device=device), torch.empty(17, 4, device=device))


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_large_products(kind: Format, act: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace holds 128 of the 300 rows, so that a matrix goes through it three times."""
    monkeypatch.setattr("ftengine.kernels.triton.linear.WORKSPACE_BYTES", 1)
    weights, numbers = matrix(kind, 300, 160, device)
    more, more_numbers = matrix(BF16, 7, 160, device)
    x, bias = torch.randn(20, 160).to(act), torch.randn(307)
    found = linear_large((weights, more), x.to(device), bias=bias.to(device))
    expected = x.double() @ torch.cat((numbers, more_numbers)).T + bias
    exact = act == torch.float32 or kind in (BF16, F32, FP8, NVFP4) or kind.name == "mxfp4"
    assert_close(found, expected, CLOSE if exact else ROUNDED)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_embedding_rows(kind: Format, dtype: torch.dtype, device: str) -> None:
    weights, numbers = matrix(kind, 140, 70, device)
    ids = torch.tensor([0, 139, 3, 3, 131], dtype=dtype)
    out = torch.empty(5, 70, device=device)
    embed(weights, ids.to(device), out)
    assert_close(out, numbers[ids.long()], 1e-7)


def test_special_numbers_pass(device: str) -> None:
    """E4M3's and E8M0's NaN, float16's infinity, subnormal numbers of every small code.

    Triton's interpreter takes E4M3's NaN for 480, so there that code is left out.
    """
    every = torch.arange(256, dtype=torch.uint8)
    if device == "cpu":
        every[[0x7F, 0xFF]] = 0
    fp8 = QuantMatrix(FP8, 1, 256, every[None], torch.ones(1))
    f16 = QuantMatrix(F16, 1, 3, torch.tensor([[float("inf"), 6e-8, float("nan")]], dtype=torch.float16))
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    scales = torch.arange(16 * 16, dtype=torch.uint8)
    scales[253:255] = 252  # with the largest codes these overflow, rightly
    mx = QuantMatrix(FORMATS["mxfp4"], 16, 512, codes, scales.view(16, 16))
    for host in (fp8, f16, mx):
        out = torch.empty(host.rows, host.columns, device=device)
        embed(upload((pack(host),), device)[0], torch.arange(host.rows, device=device), out)
        assert torch.equal(out.cpu().nan_to_num(nan=-1.0), dequantize(host).nan_to_num(nan=-1.0))


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_rms_norm(act: torch.dtype, device: str) -> None:
    wide, factor = torch.randn(5, 210) * 30, torch.rand(200)
    out = torch.empty(5, 200, dtype=act, device=device)
    rms_norm(wide.to(device)[:, :200], factor.to(device), 1e-6, out)
    expected = F.rms_norm(wide[:, :200].double(), (200,), factor.double(), 1e-6)
    assert_close(out, expected, ROUNDED if act == torch.bfloat16 else 1e-6)


def test_gated_activation(device: str) -> None:
    gate_up = torch.randn(4, 2 * 1500) * 5
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    out = torch.empty(4, 1500, device=device)
    swiglu_act(gate_up.to(device), out)
    gate, up = gate_up.double().split(1500, dim=1)
    assert_close(out, F.silu(gate) * up, 1e-6)
