"""Memory that runs out in the middle of a step on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache
from ftengine.scheduler.chunk import PrefillBudget
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.jobs import Limits
from tests.gpu import models
from tests.scheduler.driver import Driver
from tests.scheduler.test_faults import REQUESTS, Starved


class DeviceDriver(Driver):
    def __init__(self, model, device: str) -> None:
        where = "interpret" if device == "cpu" else device
        tensors = allocate_cache(model.cache_layout, models.PAGES, models.PAGE_SIZE, models.SLOTS, where)
        self.model = model
        self.cache = SequenceCache(tensors, models.PAGES, models.SLOTS)
        limits = Limits(models.PAGES * models.PAGE_SIZE, 3, model.vocab_size, ())
        self.engine = Engine(model, self.cache, limits, PrefillBudget(64, models.PAGE_SIZE, seconds=60))
        self.results = {}
        model.warm_up(tensors, lambda stage, done: None)
        self.engine.warm_up()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), [("qwen3", "resident"), ("qwen3.5", "resident"), ("qwen3.5", "hybrid")])
def test_out_of_memory_at_any_allocation_of_a_step(kind: str, strategy: str, device: str, tmp_path: Path) -> None:
    """n = 1, 2, ... until none is left to fail, or 100: requests fail as overloaded or get the answers that they get
    undisturbed; nothing leaks. Without a GPU every 16th n, on Triton's interpreter."""
    if strategy == "hybrid" and device != "cuda":
        pytest.skip("decode steps with a CPU lane take no memory where they are graphs, and only there")
    model = models.load_gpu(models.write(kind, tmp_path / "checkpoint"), device)
    model.prepare(models.setup(strategy, slots=0 if strategy == "resident" else 5))
    try:
        driver = DeviceDriver(model, device)
        expected = _answers(driver, "undisturbed", None)
        failed = 0
        for fails in range(1, 101, 1 if device == "cuda" else 16):
            starved = Starved(fails, torch.OutOfMemoryError("CUDA out of memory."))
            found = _answers(driver, str(fails), starved)
            results = [driver.results[f"{name} {fails}"] for name in REQUESTS]
            for result, wanted in zip(results, expected, strict=True):
                assert result.overloaded if result.error else result.tokens == wanted
            if starved.left > 0:
                assert found == expected
                break
            failed += any(result.error is not None for result in results)
        assert failed > 4
        assert _answers(driver, "again", None) == expected
        assert driver.engine.lost is None
    finally:
        model.close()


def _answers(driver: Driver, suffix: str, starved: Starved | None) -> list[list[int]]:
    for name, sampling in REQUESTS.items():
        driver.submit(f"{name} {suffix}", models.prompt_of(9, seed=len(name)), 4, **sampling)
    while driver.engine.has_work:
        driver._take(driver.engine.admit())
        if starved is None:
            driver._take(driver.engine.step())
        else:
            with starved:
                events = driver.engine.step()
            driver._take(events)
    driver.engine.scheduler.check_integrity()
    return [driver.results[f"{name} {suffix}"].tokens for name in REQUESTS]
