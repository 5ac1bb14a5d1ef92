"""Steps are launched without waiting for the device: by design nothing is read back in one, neither in decode steps,
which are one graph each and launched one ahead, nor in those with prefill, whose rounds are bounded without counts.

The one exception are prompts whose experts the GPU cannot read in host memory: the host copies them and has to be told
which. What a step gave is read by `collect`, when the step has ended, and is not part of the launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")

from ftengine.core import Batch
from ftengine.experts import online
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.strategy import Strategy
from ftengine.scheduler.device_sampler import DeviceSampler
from ftengine.scheduler.engine import Engine
from tests.gpu import models
from tests.gpu.test_step_faults import DeviceDriver
from tests.gpu.waits import Waits

EVERY = 1  # steps between two looks at how long layers took, in place of 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("qwen3.5", tmp_path_factory.mktemp("waits") / "model")


class WatchedDriver(DeviceDriver):
    """Once `watching`, every launch of the model happens inside of `waits.watched`, of a GPU where torch raises at each
    operation that waits, too. launches: how many of each kind there were."""

    def __init__(self, model: GpuDecoder, device: str, patch: pytest.MonkeyPatch, *, strict: bool = True) -> None:
        if device == "cpu":  # there is nothing to compile
            patch.setattr(Engine, "warm_up", lambda engine: None)
        super().__init__(model, device)
        self.waits, self.launches, self.watching = Waits(), Counter[str](), False
        self.engine.device_sampler = DeviceSampler(model.vocab_size, 3, model.device)
        self._strict = strict and device == "cuda"
        for name in ("launch", "launch_ahead"):
            patch.setattr(model, name, self._watched(name, getattr(model, name)))

    def _watched(self, name: str, original: Any) -> Any:
        def launch(batch: Batch, *arguments: Any) -> Any:
            kind = "ahead" if name == "launch_ahead" else "decode" if self.model.steps.takes(batch) else "prefill"
            if not self.watching:
                return original(batch, *arguments)
            self.launches[kind] += 1
            with raising() if self._strict else nullcontext(), self.waits.watched(self._of_the_host(batch)):
                return original(batch, *arguments)

        return launch

    def _of_the_host(self, batch: Batch) -> Iterator[torch.Tensor]:
        yield from (value for value in vars(batch).values() if isinstance(value, torch.Tensor))
        yield from self.model.steps._inputs._hosts
        yield self.model.experts.pool._control
        if self.model.experts.split is not None:
            yield self.model.experts.split._record._copy

    def ask(self) -> None:
        """One sequence alone at first, then two, drawn in different ways."""
        self.engine.cache.clear()
        number = len(self.results)
        self.submit(f"{number}", models.prompt_of(3), 7)
        for _ in range(2):
            self.step()
        self.submit(f"{number + 1}", models.prompt_of(2, seed=1), 4, temperature=1.0, top_p=0.9, seed=3)
        self.run()
        assert [result.error for result in self.results.values() if result.error] == []


@contextmanager
def raising() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def prepared(folder: Path, device: str, strategy: Strategy, **changes: object) -> GpuDecoder:
    slots = 0 if strategy in ("resident", "cpu") else 5
    model = models.load_gpu(folder, device)
    model.prepare(models.setup(strategy, slots=slots, max_running=3, **changes))
    return model


def watch(folder: Path, device: str, strategy: Strategy, patch: pytest.MonkeyPatch, *, strict: bool) -> None:
    """With `hybrid`, in both forms of decode steps, and while the split is learned from their times."""
    patch.delenv("FT_AHEAD", raising=False)
    for name, value in (("EVERY", EVERY), ("JUDGED", 0.0), ("ENOUGH", 1)):
        patch.setattr(online, name, value)
    model = prepared(folder, device, strategy, rest="at first")
    try:
        driver = WatchedDriver(model, device, patch, strict=strict)
        if device == "cuda":  # what is launched for the first time is compiled, timed, and waited for
            driver.ask()
        driver.watching = True
        driver.ask()
        assert driver.waits.found == []
        assert min(driver.launches[kind] for kind in ("prefill", "decode", "ahead")) > 0, driver.launches
        if strategy == "hybrid":
            assert model.experts.rest is not None
            assert model.experts.rest.rested > 0
            assert model.experts.split is not None
            assert model.experts.split._record._known > 0
            assert model.experts.lane is not None
            assert model.experts.lane.counts().requests > 0
    finally:
        model.close()


@pytest.mark.parametrize("strategy", ["hybrid", pytest.param("resident", marks=pytest.mark.slow)])
def test_a_launch_reads_nothing_back(
    strategy: Strategy, folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind of step, the drawing of its tokens included."""
    watch(folder, device, strategy, monkeypatch, strict=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that could be waited for")
@pytest.mark.parametrize("strategy", ["resident", "offload", "cpu", "hybrid"])
def test_no_operation_of_a_launch_waits_for_the_gpu(
    strategy: Strategy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch sees it, which raises at copies that wait, too."""
    with pytest.raises(RuntimeError, match="synchronizing"), raising():
        torch.ones(1, device="cuda").item()
    watch(folder, "cuda", strategy, monkeypatch, strict=True)


def test_a_host_that_copies_experts_is_told_which(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for, only prompts are, and that it is noticed."""
    monkeypatch.setenv("FT_AHEAD", "0")
    model = prepared(folder, device, "hybrid", readable=False)
    try:
        driver = WatchedDriver(model, device, monkeypatch, strict=False)
        driver.watching = True
        driver.submit("one", models.prompt_of(2), 1)
        driver.run()
        assert driver.launches == {"prefill": 1}
        assert {place.partition(":")[0] for place in driver.waits.found} == {"kernels/triton/stage.py"}
        assert any("tolist" in place for place in driver.waits.found)
        assert any(place.endswith(", item") for place in driver.waits.found)
        driver.waits.found.clear()
        driver.submit("two", models.prompt_of(1, seed=3), 1)
        driver.run()
        assert driver.launches == {"prefill": 1, "decode": 1}
        assert driver.waits.found == []
    finally:
        model.close()
