"""Experts of many tokens on packed blocks against float64 formulas on dequantized matrices."""

from __future__ import annotations

import pytest
import torch

from ftengine.formats.format import BF16, FORMATS, FP8_BLOCK, NVFP4, Format
from ftengine.kernels.triton import grouped
from ftengine.kernels.triton.route_order import order_routes
from tests.gpu.expert_cases import ACT, Bank, assert_close

ALL_FORMATS = tuple(FORMATS.values())


def formula(bank: Bank, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, i in (slots >= 0).nonzero().tolist():
        out[token] += weights[token, i].double() * bank.expert(int(slots[token, i]), x[token])
    return out


def run(
    bank: Bank, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, block: int, device: str
) -> None:
    order = order_routes(slots.to(device), block)
    there = out.to(device)
    grouped.experts_grouped(bank.layout, bank.blocks.to(device), order, x.to(device), weights.to(device), there)
    out.copy_(there)


@pytest.mark.parametrize("kind", ALL_FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_equals_the_formula_in_float64(kind: Format, dtype: torch.dtype, device: str) -> None:
    bank = Bank(kind, kind, 64, 48)
    slots, x = torch.randint(-1, 5, (11, 2), dtype=torch.int32), torch.randn(11, 64).to(dtype)
    weights, before = torch.rand(slots.shape), torch.randn(x.shape)
    out = before.clone()
    run(bank, x, slots, weights, out, 16, device)
    assert_close(out, before.double() + formula(bank, x, slots, weights), ACT[dtype])


def test_several_rounds_add_up_over_parts_of_the_hidden_size(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that fill neither panels nor tiles, and formats that differ."""
    monkeypatch.setattr(grouped, "RESULT_BYTES", 1)
    bank = Bank(NVFP4, FP8_BLOCK, 152, 40)
    slots, x = torch.randint(0, 5, (40, 3), dtype=torch.int32), torch.randn(40, 152).bfloat16()
    weights, out = torch.rand(slots.shape), torch.zeros(x.shape)
    for here in (slots < 2, slots == 2, slots > 2, slots > 5):
        run(bank, x, torch.where(here, slots, -1).int(), weights, out, 32, device)
    assert_close(out, formula(bank, x, slots, weights), ACT[x.dtype])


def test_nan_reaches_its_token_only(device: str) -> None:
    bank, x = Bank(BF16, BF16, 64, 32), torch.randn(20, 64)
    x[3, 7] = torch.nan
    slots, out = torch.randint(0, 5, (20, 2), dtype=torch.int32), torch.zeros(20, 64)
    run(bank, x, slots, torch.rand(20, 2), out, 16, device)
    assert out[3].isnan().all()
    assert out[torch.arange(20) != 3].isfinite().all()


@pytest.mark.parametrize("block", [16, 64])
def test_tiles_hold_each_route_once_and_one_slot_each(block: int, device: str) -> None:
    slots = torch.randint(-1, 7, (113, 4), dtype=torch.int32)
    slots[:, 0] = 3  # more routes than a tile has
    order = order_routes(slots.to(device), block)
    seen = []
    for first in order.first[: int(order.count)].tolist():
        places = [p for p in range(first, min(first + block, slots.numel())) if order.slots[p] == order.slots[first]]
        seen += order.routes[places].tolist()
        assert {int(slots.flatten()[route]) for route in order.routes[places].tolist()} == {int(order.slots[first])}
    assert sorted(seen) == (slots.flatten() >= 0).nonzero().flatten().tolist()


def test_no_route_no_tile(device: str) -> None:
    order = order_routes(torch.full((5, 2), -1, dtype=torch.int32, device=device))
    assert int(order.count) == 0
