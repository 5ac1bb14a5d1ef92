"""Experts of a decode step on packed blocks against float64 formulas on dequantized matrices."""

from __future__ import annotations

import pytest
import torch

from ftengine.errors import FtError
from ftengine.formats.format import BF16, FORMATS, FP8_BLOCK, MXFP4, NVFP4, Q8_0, ExpertLayout, Format
from ftengine.kernels.triton import experts
from ftengine.kernels.triton.buffers import Chosen
from tests.gpu.expert_cases import ACT, Bank, assert_close, chosen_experts

ALL_FORMATS = tuple(FORMATS.values())
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def run(
    bank: Bank, chosen: Chosen, x: torch.Tensor, before: torch.Tensor, device: str, early: bool = False
) -> torch.Tensor:
    layout, out = bank.layout, before.clone().to(device)
    # What is left in scratch from before must not matter.
    scratch = torch.full((*chosen.combine.shape, layout.intermediate), torch.nan, dtype=x.dtype, device=device)
    experts.experts_decode(layout, bank.blocks.to(device), chosen, x.to(device), scratch, out, early=early)
    return out.cpu()


def check(bank: Bank, tokens: int, dtype: torch.dtype, device: str) -> None:
    chosen = chosen_experts(len(bank.blocks), tokens, 2, device)
    x, before = torch.randn(tokens, bank.layout.hidden).to(dtype), torch.randn(tokens, bank.layout.hidden)
    assert_close(run(bank, chosen, x, before, device), before.double() + bank.formula(x, chosen), ACT[dtype])


@pytest.mark.parametrize("kind", ALL_FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, FLOAT32), (2, FLOAT32), (1, BFLOAT16), (3, BFLOAT16)], ids=lambda value: str(value)
)
def test_equals_the_formula_in_float64(kind: Format, tokens: int, dtype: torch.dtype, device: str) -> None:
    check(Bank(kind, kind, 64, 32), tokens, dtype, device)


@pytest.mark.parametrize(("gate_up", "down"), [(NVFP4, FP8_BLOCK), (FP8_BLOCK, BF16), (MXFP4, Q8_0)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_formats_of_the_two_products_may_differ(gate_up: Format, down: Format, tokens: int, device: str) -> None:
    """And sizes need not fill a panel or a run of words."""
    check(Bank(gate_up, down, 72, 40), tokens, BFLOAT16, device)


@pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_every_configuration_that_tuning_may_choose(
    first: bool, tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, x = Bank(NVFP4, NVFP4, 1024, 128), torch.zeros(1, 1, dtype=BFLOAT16, device=device)
    for config in experts.candidates(NVFP4, 1024 if first else 128, tokens, x, first):

        def chosen_config(kernel, key, candidates, run, config=config):
            return config if (kernel == "experts_gate_up") == first else candidates[0]

        monkeypatch.setattr(experts, "choose", chosen_config)
        check(bank, tokens, BFLOAT16, device)


@pytest.mark.parametrize(
    ("kind", "hidden", "config"),
    [
        (NVFP4, 256, {"TILES": 2, "num_warps": 2}),
        (BF16, 64, {"SPLIT": 4, "PANELS": 1, "num_warps": 4, "num_stages": 1}),
        (NVFP4, 64, {"BLOCK": 8, "num_warps": 8}),
    ],
    ids=["mma", "dots", "rows"],
)
def test_experts_that_were_in_slots_come_first_and_sums_stay_in_one_order(
    kind: Format, hidden: int, config: dict[str, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel, with turns of any kind: against the formula, and bit by bit against the order of the rows."""
    bank, x, before = Bank(kind, kind, hidden, 16), torch.randn(3, hidden).bfloat16(), torch.randn(3, hidden)

    def chosen_config(kernel, key, candidates, run):
        return config if kernel == "experts_gate_up" else candidates[0]

    monkeypatch.setattr(experts, "choose", chosen_config)
    chosen = chosen_experts(len(bank.blocks), 3, 2, device)
    found = run(bank, chosen, x, before, device, early=True)
    assert_close(found, before.double() + bank.formula(x, chosen), ACT[BFLOAT16])
    assert torch.equal(run(bank, chosen, x, before, device), found)


@pytest.mark.parametrize("kind", [NVFP4, MXFP4], ids=lambda kind: kind.name)
def test_matrix_units_take_nine_tokens(kind: Format, device: str) -> None:
    bank, x = Bank(kind, kind, 1024, 128), torch.zeros(1, 1, dtype=BFLOAT16, device=device)
    assert all("TILES" in experts.candidates(kind, size, 9, x, size > 128)[0] for size in (1024, 128))
    check(bank, 9, BFLOAT16, device)


def test_nothing_is_added_without_experts(device: str) -> None:
    bank, before = Bank(BF16, BF16, 64, 32), torch.randn(1, 64)
    chosen = chosen_experts(5, 1, 2, device)
    chosen.count.zero_()
    assert torch.equal(run(bank, chosen, torch.randn(1, 64), before, device), before)


@pytest.mark.parametrize("tokens", [3, 1])
def test_nan_reaches_its_token_only(tokens: int, device: str) -> None:
    bank, x = Bank(NVFP4, NVFP4, 64, 32), torch.randn(tokens, 64).bfloat16()
    x[0, 7] = torch.nan
    found = run(bank, chosen_experts(5, tokens, 2, device), x, torch.zeros(tokens, 64), device)
    assert found[0].isnan().all()
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_gates_and_activations_of_any_size(size: float, device: str) -> None:
    """silu(-1e4) is -0, silu(1e4) is 1e4; and the codes' missing power of two loses nothing at either end."""
    bank, x = Bank(NVFP4, FP8_BLOCK, 64, 32), torch.randn(1, 64) * size
    chosen = chosen_experts(5, 1, 2, device)
    found, expected = run(bank, chosen, x, torch.zeros(1, 64), device).double(), bank.formula(x, chosen)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_slots_beyond_two_gigabytes_are_found(device: str) -> None:
    """The kernels' offsets are 64 bits wide. Only where memory is not touched before it is written."""
    bank, count = Bank(BF16, BF16, 32, 32), (1 << 31) // (Bank(BF16, BF16, 32, 32).blocks.shape[1]) + 2
    large = Bank(BF16, BF16, 32, 32)
    large.blocks = torch.empty(count, bank.blocks.shape[1], dtype=torch.uint8)
    large.blocks[-1] = bank.blocks[0]
    large.plain = [bank.plain[0]] * count
    chosen = Chosen.allocate(1, 1, device)
    chosen.count.fill_(1)
    chosen.slot.fill_(count - 1)
    chosen.combine.fill_(1)
    x = torch.randn(1, 32)
    assert_close(run(large, chosen, x, torch.zeros(1, 32), device), large.formula(x, chosen), ACT[FLOAT32])


def test_what_is_not_computed_is_refused(device: str) -> None:
    chosen = chosen_experts(5, 1, 2, device)
    x, scratch = torch.zeros(1, 64, device=device), torch.zeros(4, 2, 32, device=device)
    for layout, error, text in (
        (ExpertLayout(64, 32, NVFP4, NVFP4, bias=True), FtError, "biases"),
        (ExpertLayout(64, 31, NVFP4, NVFP4), FtError, "odd size"),
        (ExpertLayout(64, 64, NVFP4, NVFP4), ValueError, "scratch"),
        (ExpertLayout(96, 32, NVFP4, NVFP4), ValueError, "expected"),
    ):
        blocks = torch.zeros(5, layout.block_bytes, dtype=torch.uint8, device=device)
        with pytest.raises(error, match=text):
            experts.experts_decode(layout, blocks, chosen, x, scratch, torch.zeros(1, 64, device=device))
