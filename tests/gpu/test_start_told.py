"""What the start on a GPU checks, limits and says: of the plan, of pinned memory, of what was really used."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.experts.pinned import PinLimits
from ftengine.kernels.triton import tuning
from ftengine.memory.estimate import WeightSizes
from ftengine.memory.gpu import interpreter
from ftengine.memory.vram import Demand, DevicePlan, plan_device
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.strategy import Strategy
from ftengine.scheduler import start_gpu
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.lanes import LaneChoice, PinnedBanks, choose_lanes
from ftengine.scheduler.start_gpu import report, start_on_gpu
from tests.gpu import models
from tests.gpu.test_start import CONFIG
from tests.gpu.test_start_parts import GIB, Unread, beginning, card

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("qwen3.5", tmp_path_factory.mktemp("told") / "model")


@pytest.fixture
def own_cache(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a start takes for the whole process."""
    monkeypatch.setattr(tuning, "_tuner", tuning._tuner)


@pytest.fixture
def demand() -> Demand:
    """400 experts of 16 MiB, of which about half fit into 4 GiB."""
    weights = WeightSizes(dense=GIB // 2, banks=400 << 24, layers=4, experts=100, block=1 << 24)
    return Demand(weights, 0, 0, token=32 << 10, state=0, top_k=4, max_context=65536)


@pytest.fixture
def plan(demand: Demand) -> DevicePlan:
    made = plan_device(EngineConfig("x"), demand, 4 * GIB)
    assert 0 < made.slots.value < 400
    return made


def test_the_log_says_what_a_smaller_context_would_buy(
    plan: DevicePlan, demand: Demand, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of 32,768 tokens of 32 KiB are 512 MiB, or 32 experts."""
    caplog.set_level(logging.INFO, "ftengine")
    report(plan, demand, card(4 * GIB), CPU)
    (note,) = (record for record in caplog.records if "would make room" in record.getMessage())
    assert note.getMessage().startswith(f"{plan.slots.value} of 400 experts (")
    assert note.getMessage().endswith("keys and values of 16384 tokens in place of 32768 would make room for 32 more")


@pytest.mark.parametrize("more", [0, GIB // 4])
def test_what_was_used_stands_beside_the_plan(
    more: int, plan: DevicePlan, demand: Demand, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are those that torch and the driver would give."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: plan.used + more)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: plan.budget.value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB - plan.budget.value - more, 8 * GIB))
    caplog.set_level(logging.INFO, "ftengine")
    report(plan, demand, card(4 * GIB), CUDA)
    assert "used at the most" in caplog.text
    assert ("GPU memory: 0.25 GiB more than planned were used" in caplog.text) == bool(more)
    assert ("GPU memory: 0.25 GiB over the budget are gone" in caplog.text) == bool(more)


@pytest.mark.usefixtures("own_cache")
def test_the_budget_is_torchs_own_limit(folder: Path, plan: DevicePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9 of the free 4 of 8 GiB."""
    limits: list[float] = []
    monkeypatch.setattr(start_gpu, "_first_contact", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    start_gpu._use_gpu(beginning(folder, device="cuda"), card(4 * GIB), plan)
    assert limits == [pytest.approx(0.45)]
    start_gpu._use_gpu(beginning(folder, device="interpret"), card(4 * GIB), plan)
    assert len(limits) == 1


def test_offload_is_refused_before_anything_is_read_where_windows_will_not_pin(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    begin = beginning(folder, device="interpret", moe_backend="offload")
    limits = PinLimits(memlock=None, wsl=True, total=begin.sizes.banks)
    monkeypatch.setattr(start_gpu, "pin_limits", lambda: limits)
    monkeypatch.setattr(start_gpu, "_use_gpu", read)
    begin = dataclasses.replace(begin, weights=Unread(begin.weights))
    with pytest.raises(ConfigError, match=r"--moe-backend offload needs .* of pinned memory; under WSL 2 Windows"):
        start_on_gpu(begin, interpreter(), Resolved("interpret", "asked for"))


def chosen(strategy: Strategy) -> LaneChoice:
    nothing = PinnedBanks(Resolved(True, "nothing"))
    return LaneChoice(Resolved(strategy, "predicted"), Resolved(3, "CPUs"), nothing)


@pytest.mark.parametrize(
    ("strategy", "works"), [("resident", False), ("offload", False), ("cpu", True), ("hybrid", True)]
)
def test_threads_are_told_of_where_they_compute(strategy: Strategy, works: bool, plan: DevicePlan) -> None:
    facts = start_gpu._facts(card(4 * GIB), plan, chosen(strategy))
    assert ("moe_cpu_threads" in facts) == works


def test_memory_that_the_cpus_strategy_leaves_is_not_planned_any_more(plan: DevicePlan, demand: Demand) -> None:
    left = start_gpu._given_out(plan, demand, chosen("cpu"))
    assert left.slots == Resolved(0, f"moe_backend cpu: the CPU computes them in decode; {plan.slots.value} would fit")
    assert left.used == plan.used - plan.slots.value * (1 << 24) == sum(left.parts(demand).values())
    assert not left.notes
    assert start_gpu._given_out(plan, demand, chosen("hybrid")) is plan


@pytest.mark.usefixtures("own_cache")
def test_a_start_that_ends_at_the_cpus_strategy_says_so_and_is_warm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto`, with room for 5 experts; another machine's figures make it choose `cpu`."""
    warmed: list[Engine] = []
    whole, threads = Engine.warm_up, torch.get_num_threads()

    def choose(*given: object) -> LaneChoice:
        found = choose_lanes(*given)
        return dataclasses.replace(found, strategy=Resolved("cpu", "predicted"), rests=False)

    def warm_up(engine: Engine) -> None:
        warmed.append(engine)
        whole(engine)

    monkeypatch.setattr(start_gpu, "choose_lanes", choose)
    monkeypatch.setattr(start_gpu, "keep_off_cores", lambda threads: None)  # of this process
    monkeypatch.setattr(Engine, "warm_up", warm_up)
    caplog.set_level(logging.INFO, "ftengine")
    begin = beginning(folder, device="interpret", moe_cache_size=5, **{**CONFIG, "moe_cpu_threads": 1})
    try:
        _, started = start_on_gpu(begin, interpreter(), Resolved("interpret", "asked for"))
    finally:
        torch.set_num_threads(threads)
    assert started is not None
    model = started.engine.model
    assert isinstance(model, GpuDecoder)
    try:
        assert warmed == [started.engine]
        assert model.experts.pool is not None
        assert model.experts.pool.tensors.slots == started.facts["moe_cache_size"].value == 0
        assert started.facts["moe_cache_size"].reason.endswith("5 would fit")
        assert "expert slots" not in caplog.text
    finally:
        started.engine.close(1.0)
        model.close()
