"""The expert cache's numbers, written where the kernels write them, read through an engine's statistics and its log."""

from __future__ import annotations

import logging

import pytest
import torch

from ftengine.experts.pool import ExpertBank
from ftengine.experts.slots import SlotPool
from ftengine.formats.format import BF16, ExpertLayout
from ftengine.kernels.triton import cache_state as at
from ftengine.scheduler.expert_stats import ENOUGH_STEPS, expert_stats
from ftengine.scheduler.stats import WorkLog
from tests.scheduler.driver import Driver
from tests.scheduler.tiny import TinyModel


def test_the_pools_counters(device: str, caplog: pytest.LogCaptureFixture) -> None:
    layout = ExpertLayout(32, 32, BF16, BF16)
    banks = {layer: ExpertBank.allocate(layout, 4) for layer in range(2)}
    pool = SlotPool(banks, slots=3, staging=2, top_k=2, device=device)
    values = {at.HITS: 40, at.MISSES: 60, at.FETCHED: 10, at.KEPT: 4, at.CPU_EXPERTS: 50, at.CPU_ROUTES: 55,
              at.ADMITTED: 2, at.STEPS: 30, at.WAITED: 1_500_000, at.STAGED: 7, at.SEEDED: 1,
              at.COPIED: 700_000, at.PREFETCHED: 9, at.FORETOLD: 8}  # fmt: skip
    for place, value in values.items():
        pool.tensors.counters[0, place.value] = value
        pool.tensors.counters[1, place.value] = 2 * value
    model = TinyModel(recurrent=False)
    model.experts = _Experts(pool)
    found = Driver(model).engine.stats(layers=True)["experts"]
    assert (found["slots"], found["pool"], found["layer_count"], found["decode_steps"]) == (3, 8, 2, 45)
    total, block = found["total"], layout.block_bytes
    assert (total["hits"], total["misses"], total["hit_rate"]) == (120, 180, (120 - 24) / 300)
    assert (total["prefetched"], total["foretold"], found["prefetch"]) == (27, 24, 0)
    assert total["link_bytes"] == 3 * (10 + 2 + 7 + 9) * block
    assert total["cpu_bytes"] == 3 * 50 * block
    assert total["cpu_wait_ms"] == 4.5
    assert found["link_ms"] == total["link_ms"] == 2.1
    assert [layer["link_ms"] for layer in found["layers"]] == [0.7, 1.4]
    assert found["cpu_ms"] == total["cpu_ms"] == 0.0  # there is no lane
    assert [layer["admitted"] for layer in found["layers"]] == [2, 4]
    assert found["link_cost"] == {"fixed_us": 3.0, "each_us": 35.0}
    assert found["cpu_share"] is None
    assert Driver(model).engine.stats()["experts"]["layers"] is None

    engine = Driver(model).engine
    work_log = WorkLog(engine.counters, engine.scheduler, 1e-9, engine.expert_stats)
    pool.tensors.counters[:, at.HITS.value] = pool.tensors.counters[:, at.FORETOLD.value]
    pool.tensors.counters[:, at.STEPS.value] = ENOUGH_STEPS
    with caplog.at_level(logging.WARNING):
        assert "experts 0.0% in slots" in (work_log.line() or "")
        assert "in slots" not in (work_log.line() or "")
    assert [record.message[:22] for record in caplog.records] == ["the cache of 3 experts"]


def test_each_layer_has_the_time_of_its_cpu_lane(device: str) -> None:
    """A lane that was asked for one layer twice and for another once, as it tells itself."""
    pytest.importorskip("ftengine._native")
    from ftengine.experts import mailbox as mailboxes
    from ftengine.experts.lane import Lane

    layout = ExpertLayout(32, 32, BF16, BF16)
    banks = {layer: ExpertBank.allocate(layout, 4) for layer in range(3)}
    for bank in banks.values():
        bank.blocks.zero_()
    model = TinyModel(recurrent=False)
    model.experts = _Experts(SlotPool(banks, slots=3, staging=2, top_k=2, device=device))
    with Lane([banks[layer] for layer in range(3)], mailboxes.allocate(1, 2, 32, torch.float32, "cpu"), 1) as lane:
        for layer in (2, 0, 2):
            lane.request(layer, torch.randn(1, 32), torch.tensor([[0, 1]], dtype=torch.int32), torch.rand(1, 2))
    model.experts.lane = lane
    found = expert_stats(model, layers=True)
    assert found is not None
    assert found.layers is not None
    first, second, third = lane.log()[:, 3] / 1e6
    assert [layer.cpu_ms for layer in found.layers] == pytest.approx([second, 0.0, first + third], abs=1e-3)
    assert found.cpu_ms == found.total.cpu_ms == pytest.approx(first + second + third, abs=1e-3)


def test_prefetching_is_on_where_it_is_possible(device: str) -> None:
    """A layer has to come before, slots to take it, and the GPU to read the experts where they lie."""
    layout = ExpertLayout(32, 32, BF16, BF16)

    def shown(layers: int = 2, slots: int = 3, **kind: bool) -> int:
        banks = {layer: ExpertBank.allocate(layout, 4) for layer in range(layers)}
        pool = SlotPool(banks, slots=slots, staging=2, top_k=2, device=device, **kind)
        pool.set_prefetch(5)
        model = TinyModel(recurrent=False)
        model.experts = _Experts(pool)
        found = expert_stats(model)
        assert found is not None
        return found.prefetch

    assert shown() == 5
    assert [shown(layers=1), shown(slots=0), shown(resident=True), shown(readable=False)] == [0, 0, 0, 0]


class _Experts:
    """Of a GpuDecoder, what statistics look at."""

    def __init__(self, pool) -> None:
        self.pool = pool
        self.lane = None
