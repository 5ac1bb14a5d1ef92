"""Parts of the start on a GPU: what falls back, what is refused, what an error of torch becomes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.kernels.triton import tuning
from ftengine.memory import estimate, plan
from ftengine.memory.estimate import WeightSizes
from ftengine.memory.gpu import Gpu, interpreter
from ftengine.memory.plan import lane_threads
from ftengine.memory.vram import Demand, plan_device
from ftengine.scheduler import beginning as scheduler_beginning
from ftengine.scheduler import start_gpu
from ftengine.scheduler.beginning import Beginning
from ftengine.scheduler.lanes import choose_lanes
from ftengine.scheduler.start_gpu import _explained, demand_of, start_on_gpu, warm_prefill
from ftengine.scheduler.timeline import Timeline
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.open import open_source
from tests.gpu import models
from tests.scheduler.driver import Driver
from tests.scheduler.tiny import TinyModel, write_checkpoint

GIB = 1 << 30


def card(free: int) -> Gpu:
    return Gpu("Small Card", (8, 9), 2 * free, free, 13000, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("qwen3.5", tmp_path_factory.mktemp("start") / "model")


def beginning(folder: Path, **values) -> Beginning:
    config, checkpoint = EngineConfig(str(folder), **values), Checkpoint.open(folder)
    weights = open_source(checkpoint)
    sizes = estimate.weight_sizes(weights, checkpoint.text_config)
    two, float32 = Resolved(2, "asked for"), Resolved("float32", "asked for")
    return Beginning(config, checkpoint, weights, sizes, two, float32, lambda stage, done: None, Timeline())


def test_a_gpu_that_is_too_small_is_left_alone_by_auto(folder: Path) -> None:
    device, started = start_on_gpu(beginning(folder), card(100 << 20), Resolved("cuda", "found"))
    assert started is None
    assert device.value == "cpu"
    assert device.reason.startswith("the Small Card is too small: 0.38 GiB are the least that this model needs there")
    assert "0.09 GiB can be used (0.9 (default) of 0.10 GiB free)" in device.reason


def test_and_refused_where_it_is_asked_for(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"workspace for steps of 2048 tokens need 0.[34]\d GiB, but of the GPU's memory"
    ):
        start_on_gpu(beginning(folder, device="cuda"), card(100 << 20), Resolved("cuda", "found"))


class Unread:
    """Weights of which headers are known, and nothing may be read."""

    def __init__(self, source) -> None:
        self.tensors, self.expert_layout = source.tensors, source.expert_layout


def test_experts_that_the_hosts_memory_cannot_hold_are_refused_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = beginning(folder)
    begin = dataclasses.replace(begin, weights=Unread(begin.weights))
    monkeypatch.setattr(
        scheduler_beginning, "available_memory", lambda: (begin.sizes.banks, "memory limit of the cgroup")
    )
    banks = r"the routed experts need 0\.00 GiB of memory, but of 0\.00 GiB available \(memory limit of the cgroup\)"
    with pytest.raises(ConfigError, match=banks):
        start_on_gpu(begin, card(20 * GIB), Resolved("cuda", "found"))


@pytest.fixture
def own_cache(ft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a start takes for the whole process."""
    monkeypatch.setattr(tuning, "_tuner", tuning._tuner)


@pytest.mark.usefixtures("own_cache")
def test_an_architecture_of_the_cpu_only_is_served_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path / "model", recurrent=False)
    device, started = start_on_gpu(beginning(folder, device="interpret"), interpreter(), Resolved("interpret", "asked"))
    assert device == Resolved("cpu", "TinyForTests is computed on the CPU only")
    assert started is not None
    assert isinstance(started.engine.model, TinyModel)
    assert "the interpreter of Triton stays unused: TinyForTests is computed on the CPU only" in caplog.text


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("name", "value"), [("moe_cache_size", 3), ("memory_ratio", 0.5), ("moe_backend", "hybrid")])
def test_and_with_no_setting_that_only_a_gpu_gives_a_meaning_to(name: str, value: object, tmp_path: Path) -> None:
    begin = beginning(write_checkpoint(tmp_path / "model"), device="interpret", **{name: value})
    with pytest.raises(ConfigError, match=r"needs a GPU, .*: TinyRecurrentForTests is computed on the CPU only$"):
        start_on_gpu(begin, interpreter(), Resolved("interpret", "asked"))


def test_the_demand_is_the_models(folder: Path) -> None:
    demand = demand_of(beginning(folder))
    model = models.load_gpu(folder, "cpu") if not torch.cuda.is_available() else models.load_gpu(folder, "cuda")
    assert demand.weights.layers == len(model.banks)
    assert demand.weights.experts == model.banks[0].experts
    assert demand.top_k == model.weights.moes[0].top_k
    assert demand.max_context == model.max_context


def test_what_torch_says_in_paragraphs_becomes_a_sentence() -> None:
    demand = Demand(WeightSizes(dense=GIB), 0, 0, token=1024, state=0, top_k=0, max_context=4096)
    plan = plan_device(EngineConfig("x"), demand, 4 * GIB)
    told = _explained(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore."), plan, demand)
    assert isinstance(told, ConfigError)
    assert "\n" not in str(told)
    assert "of 3.60 GiB (0.9 (default) of 4.00 GiB free) were planned: dense weights 1.00 GiB" in str(told)
    assert str(told).endswith("Tried to allocate 9 GiB.")
    assert "--memory-ratio" in told.next_step
    told = _explained(RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might"), plan, demand)
    assert str(told) == "the GPU fails during the start: CUDA error: unspecified launch failure"
    other = RuntimeError("shapes differ")
    assert _explained(other, plan, demand) is other


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_offload_needs_pinned_memory(folder: Path, tmp_path: Path) -> None:
    model = models.load_gpu(folder, "cpu")
    config = EngineConfig(str(folder), moe_backend="offload", moe_cache_size=2)
    plan = plan_device(config, demand_of(beginning(folder)), 20 * GIB)
    with pytest.raises(ConfigError, match="--moe-backend offload needs pinned memory: no GPU"):
        choose_lanes(config, model.banks, 2, plan, torch.float32, torch.device("cuda"), tmp_path)
    assert not list(tmp_path.iterdir()), "lanes were measured for nothing"


def test_threads_of_the_cpus_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "usable_cpus", lambda: 6)
    assert lane_threads(EngineConfig("x", moe_cpu_threads=3, threads=5)) == Resolved(3, "asked for")
    assert lane_threads(EngineConfig("x", threads=5)) == Resolved(5, "as many as threads")
    assert lane_threads(EngineConfig("x", threads=9)) == Resolved(6, "as many as threads")
    assert lane_threads(EngineConfig("x", moe_cpu_threads=9)).value == 6


@pytest.mark.parametrize(
    ("cpus", "quota", "threads", "reason"),
    [
        (1, None, 1, "CPUs this process may use, less one"),
        (4, None, 3, "CPUs this process may use, less one"),
        (7, None, 6, "CPUs this process may use, less one"),
        (8, None, 6, "CPUs this process may use, less two"),
        (16, None, 14, "CPUs this process may use, less two"),
        (64, 4, 3, "CPU limit of the cgroup, less one"),
        (64, 12, 10, "CPU limit of the cgroup, less two"),
        (4, 64, 3, "CPUs this process may use, less one"),
    ],
)
def test_some_cpus_are_left_to_the_threads_that_feed_the_lane(
    cpus: int, quota: int | None, threads: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that the process has: with all of a quota the lane, which spins, would stop the launching thread."""
    monkeypatch.setattr(plan, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(plan, "cgroup_cpus", lambda: quota)
    assert lane_threads(EngineConfig("x")) == Resolved(threads, reason)


def test_prompts_that_warm_up_leave_nothing_behind() -> None:
    """Of fewer tokens than the tests' model has numbers for accidents; 48 is what a context of 50 holds."""
    model = TinyModel(recurrent=True, max_context=128)
    driver = Driver(model, pages=64, page_size=4, context=50, chunk=32)
    warm_prefill(driver.engine, [40, 9, 5000])
    tokens = [tokens for _, tokens in model.batches]
    assert (sum(tokens), max(tokens), tokens[0]) == (48 + 40 + 9, 32, 32)
    assert driver.engine.cache.pages.free_count == 64
    model.embedding = model.embedding[:0]
    with pytest.raises(RuntimeError, match=r"the model failed in this step: IndexError.* \(computing 20 tokens\)"):
        warm_prefill(driver.engine, [20])


@pytest.mark.parametrize(
    ("name", "value"), [("FT_PREFETCH", "9"), ("FT_PREFETCH", ""), ("FT_SPLIT", "half"), ("FT_CACHE_POLICY", "mru")]
)
def test_variables_are_refused_before_weights_are_read(
    name: str, value: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setenv(name, value)
    monkeypatch.setattr(start_gpu, "load", read)
    with pytest.raises(ConfigError, match=f"{name} is '{value}'") as caught:
        start_on_gpu(beginning(folder, device="interpret"), interpreter(), Resolved("interpret", "asked for"))
    assert caught.value.next_step == f"unset {name}"
