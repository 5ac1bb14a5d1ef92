"""Memory that runs out in the middle of a step on a GPU."""

from __future__ import annotations

import itertools
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
        tensors = allocate_cache(model.cache_layout, models.PAGES, models.PAGE_SIZE, models.SLOTS, device)
        self.model = model
        self.cache = SequenceCache(tensors, models.PAGES, models.SLOTS)
        limits = Limits(models.PAGES * models.PAGE_SIZE, 3, model.vocab_size, ())
        self.engine = Engine(model, self.cache, limits, PrefillBudget(64, models.PAGE_SIZE, seconds=60))
        self.results = {}
        model.warm_up(tensors, lambda stage, done: None)
        self.engine.warm_up()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_out_of_memory_at_any_allocation_of_a_step(kind: str, device: str, tmp_path: Path) -> None:
    """n = 1, 2, ... until none is left to fail, or 100: requests fail as overloaded or get the answers that they get
    undisturbed; nothing leaks."""
    if device != "cuda":
        pytest.skip(
            "there is no GPU whose memory could run out; tests/scheduler/test_faults.py has the same without one"
        )
    model = models.load_gpu(models.write(kind, tmp_path / "checkpoint"), device)
    model.prepare(models.setup("resident"))
    try:
        driver = DeviceDriver(model, device)
        expected = _answers(driver, "undisturbed", None)
        for fails in itertools.count(1):
            starved = Starved(fails, torch.OutOfMemoryError("CUDA out of memory."))
            found = _answers(driver, str(fails), starved)
            results = [driver.results[f"{name} {fails}"] for name in REQUESTS]
            for result, wanted in zip(results, expected, strict=True):
                assert result.overloaded if result.error else result.tokens == wanted
            if starved.left > 0 or fails == 100:
                break
            assert any(result.error for result in results)
        assert fails > 10
        assert found == expected or fails == 100
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
