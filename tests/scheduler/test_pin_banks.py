"""Pins of a model's experts, held against the book that a CUDA runtime keeps of registered memory."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system")
pytest.importorskip("ftengine._native", reason="the CPU's lane is not built")

from ftengine.config import EngineConfig
from ftengine.errors import FtError
from ftengine.experts.pinned import PinLimits, Pinned, Refused, register
from ftengine.experts.pool import ExpertBank
from ftengine.formats.format import BF16, ExpertLayout
from ftengine.memory.estimate import WeightSizes
from ftengine.memory.vram import Demand, plan_device
from ftengine.scheduler import lanes
from tests.experts.test_pinned import Runtime

CUDA = torch.device("cuda")
LAYERS = 3


@pytest.fixture
def banks() -> dict[int, ExpertBank]:
    """Large enough to lie on pages of their own."""
    return {layer: ExpertBank.allocate(ExpertLayout(256, 128, BF16, BF16), 8) for layer in range(LAYERS)}


def use(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, wrong: str | None = None) -> Runtime:
    def pin(tensor: torch.Tensor, limits: PinLimits) -> Pinned | Refused:
        return register(tensor, runtime, limits)

    monkeypatch.setattr(lanes, "pin", pin)
    monkeypatch.setattr(lanes, "verify_readable", lambda bank, device: wrong)  # there is no GPU to read them
    return runtime


def test_what_is_pinned_are_the_banks_and_all_of_it_is_given_back(
    banks: dict[int, ExpertBank], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = use(Runtime(), monkeypatch)
    with closing(lanes.pin_banks(banks, CUDA)) as pinned:
        assert pinned.outcome.value
        assert runtime.registered == {bank.blocks.data_ptr(): bank.blocks.nbytes for bank in banks.values()}
    assert runtime.registered == {}
    pinned.close()  # the runtime fails where something is unregistered that is not registered


def test_where_one_is_refused_none_stays_pinned(banks: dict[int, ExpertBank], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(Runtime(refuses_from=LAYERS - 1), monkeypatch)
    pinned = lanes.pin_banks(banks, CUDA)
    assert not pinned.outcome.value
    assert "error 2, out of memory" in pinned.outcome.reason
    assert (runtime.calls, runtime.registered) == (LAYERS, {})


def test_nor_where_the_gpu_reads_something_else(banks: dict[int, ExpertBank], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(Runtime(), monkeypatch, wrong="the GPU reads 7 words wrongly")
    with pytest.raises(FtError, match="reads 7 words wrongly, in MoE layer 0"):
        lanes.pin_banks(banks, CUDA)
    assert (runtime.calls, runtime.registered) == (LAYERS, {})


def test_a_choice_holds_the_pins_and_a_failed_one_does_not(
    banks: dict[int, ExpertBank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime = use(Runtime(), monkeypatch)
    sizes = WeightSizes(dense=1 << 20)
    plan = plan_device(EngineConfig("x"), Demand(sizes, 0, 0, token=1024, state=0, top_k=0, max_context=64), 1 << 33)

    def choose(resident: bool) -> lanes.LaneChoice:
        chosen = dataclasses.replace(plan, resident=resident)
        return lanes.choose_lanes(EngineConfig("x"), banks, 2, chosen, torch.float32, CUDA, tmp_path)

    def fails(*given: object, **settings: object) -> None:
        assert len(runtime.registered) == LAYERS
        raise RuntimeError("the lane fails")

    choice = choose(resident=True)
    assert choice.pinned.value
    assert len(runtime.registered) == LAYERS
    choice.banks.close()
    assert runtime.registered == {}
    monkeypatch.setattr(lanes, "lane_profile", fails)
    with pytest.raises(RuntimeError, match="the lane fails"):
        choose(resident=False)
    assert runtime.registered == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_copies_from_where_pinned_experts_were() -> None:
    """Larger than what was there before, so that a copy would reach from addresses still registered into others."""
    layout = ExpertLayout(2048, 512, BF16, BF16)
    experts = {0: ExpertBank.allocate(layout, 16)}
    size = experts[0].blocks.nbytes
    with closing(lanes.pin_banks(experts, CUDA)) as pinned:
        assert pinned.outcome.value
    del experts
    for factor in (1, 2, 3):
        fresh = torch.full((factor * size // 2,), 3, dtype=torch.uint8)
        assert int(fresh.to(CUDA).sum(dtype=torch.int64)) == 3 * len(fresh)
