"""Norm and routing, row by row, against float64 formulas."""

from __future__ import annotations

import pytest
import torch

from ftengine.kernels import mixers

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize("width", [1, 7, 32, 100, 2048])
def test_rms_norm(isa: str, width: int) -> None:
    x, weight = torch.randn(5, width) * 3, torch.randn(width)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = mixers.rms_norm(x, weight, 1e-6, torch.float32, 2, isa)
    torch.testing.assert_close(found[:, :width].double(), expected, rtol=1e-6, atol=1e-6)
    assert not found[:, width:].any()
    rounded = mixers.rms_norm(x, weight, 1e-6, torch.bfloat16, 2, isa)
    assert torch.equal(rounded, found.bfloat16())


@pytest.mark.parametrize("isa", mixers.versions())
def test_rms_norm_spreads_nan_over_its_row(isa: str) -> None:
    x = torch.randn(3, 40)
    x[1, 3] = NAN
    found = mixers.rms_norm(x, torch.ones(40), 1e-6, torch.bfloat16, 1, isa)[:, :40]
    assert found[1].isnan().all()
    assert not found[::2].isnan().any()


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (60, 4), (128, 128), (256, 8), (300, 10), (513, 1)])
@pytest.mark.parametrize("normalize", [False, True])
def test_route(isa: str, experts: int, top_k: int, normalize: bool) -> None:
    logits = torch.randn(9, experts) * 4
    ids, weights = mixers.route(logits, top_k, normalize, 2, isa)
    probabilities = logits.double().softmax(-1)
    expected, order = probabilities.sort(descending=True, stable=True)
    expected = expected[:, :top_k]
    if normalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(ids.long(), order[:, :top_k])
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("isa", mixers.versions())
def test_equal_logits_choose_the_lower_id(isa: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0], [0.0] * 6])
    ids, weights = mixers.route(logits, 4, True, 1, isa)
    assert ids.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    torch.testing.assert_close(weights[1], torch.full((4,), 0.25))


@pytest.mark.parametrize("isa", mixers.versions())
@pytest.mark.parametrize("normalize", [False, True])
def test_route_of_logits_that_are_no_numbers(isa: str, normalize: bool) -> None:
    """-Inf is a probability of zero; NaN and +Inf give NaN weights, as torch's softmax does, and ids that exist."""
    rows = [[-INF, 1.0, -INF, 1.0], [NAN, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, NAN], [1.0, INF, 0.0, 0.0], [-INF] * 4]
    ids, weights = mixers.route(torch.tensor(rows), 3, normalize, 1, isa)
    assert ids[0].tolist() == [1, 3, 0]
    torch.testing.assert_close(weights[0], torch.tensor([0.5, 0.5, 0.0]))
    assert weights[1:].isnan().any(-1).all()
    assert ((ids >= 0) & (ids < 4)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())
