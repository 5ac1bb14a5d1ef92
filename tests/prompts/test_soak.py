"""Many random requests of several sessions at a time, with budgets that hold little: books and budgets stay right all
the way, a client that leaves is gone with the next step, and nothing is left in the end.

    python -m pytest tests/prompts/test_soak.py -m slow    # 2,000 requests
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ftengine.config import EngineConfig
from ftengine.core import FinishReason
from tests.prompts import small_models
from tests.prompts.driver import PromptEngine
from tests.prompts.edits import EDITS, Talk
from tests.prompts.loaded import CONTEXT, KINDS, VOCABULARY, Load, Loaded

SESSIONS = 6
RUNNING = 3
EVERY = 20  # steps between two looks at the books
MOST_GROWTH = 64 << 20  # bytes, of which what sessions remember may be the most


def tiny_budgets(loaded: Loaded, cache_dir: Path) -> EngineConfig:
    layout = loaded.model.cache_layout
    slot, least = small_models.slot_bytes(layout), small_models.least_bytes(layout)
    return EngineConfig(
        str(loaded.folder),
        dtype=layout.dtype,
        device="cpu",
        context=CONTEXT,
        kv_tokens=CONTEXT + 1024,
        max_running_requests=RUNNING,
        prefill_chunk=512,
        step_seconds=60,
        cache_device=6 * slot,
        cache_host=3 * least,
        cache_disk=8 * least,
        cache_dir=str(cache_dir),
    )


def check_budgets(engine: PromptEngine, config: EngineConfig) -> None:
    engine.engine.scheduler.check_integrity()
    tiers = engine.cache.tiers
    assert tiers is not None
    used = {sizes.name: sizes.used for sizes in tiers.sizes()}
    assert used["host"] <= (config.cache_host or 0)
    assert used["disk"] <= (config.cache_disk or 0)
    assert on_disk(Path(config.cache_dir or "")) <= (config.cache_disk or 0)


def on_disk(folder: Path) -> int:
    """Bytes of records there, whole ones and those that are being written."""
    total = 0
    for path in folder.rglob("*-*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # evicted meanwhile
            continue
    return total


def requests(engine: PromptEngine, config: EngineConfig, count: int, seed: int) -> None:
    choose = random.Random(seed)
    talks = [Talk(str(number), choose, VOCABULARY, (5, 300)) for number in range(SESSIONS)]
    for talk in talks:
        talk.begin(talk.system(choose.choice((60, 700))))
    under_way: dict[str, Talk] = {}
    left: set[str] = set()
    sent = steps = 0
    while sent < count or engine.engine.has_work:
        if sent < count and len(under_way) < 2 * RUNNING and choose.random() < 0.5:
            talk = choose.choice(talks)
            choose.choice(EDITS)(talk)
            if len(talk.prompt()[0]) > CONTEXT // 2:
                EDITS[-1](talk)
            side = choose.random() < 0.1
            under_way[engine.submit(*talk.prompt(), choose.randint(1, 12), session=talk.name, side=side)] = talk
            sent += 1
        if under_way and choose.random() < 0.05:
            name = choose.choice(list(under_way))
            engine.cancel(name)
            left.add(name)
        engine.step()
        steps += 1
        assert all(engine.answers[name].finish is not None for name in left), "one that left is still there"
        for name in [name for name in under_way if engine.answers[name].finish is not None]:
            talk, answer = under_way.pop(name), engine.answers[name]
            if answer.finish is FinishReason.LENGTH and choose.random() < 0.8:
                talk.answered(answer.tokens)
        if steps % EVERY == 0:
            check_budgets(engine, config)
        if choose.random() < 0.002:
            engine.cache.clear()
    assert left
    check_budgets(engine, config)


def soak(loaded: Loaded, cache_dir: Path, count: int) -> None:
    config = tiny_budgets(loaded, cache_dir)
    files, threads = open_files(), prompt_threads()
    engine = PromptEngine(loaded.model, config)
    requests(engine, config, count // 4, seed=1)
    before = psutil.Process().memory_info().rss
    requests(engine, config, count - count // 4, seed=2)
    grown = psutil.Process().memory_info().rss - before
    engine.settle()
    engine.check()
    told = {sizes.name: sizes for sizes in engine.cache.tiers.sizes()}
    engine.cache.clear()
    engine.settle()
    assert engine.cache.pages.used_count == engine.cache.slots.used_count == engine.cache.tree.size == 0
    engine.close()
    print(f"{count} requests, {grown >> 20} MiB more memory, {told}")
    assert told["host"].evictions > 0
    assert all(sizes.failures == 0 for sizes in told.values())
    assert grown < MOST_GROWTH
    until(lambda: prompt_threads() <= threads, "the tiers' threads live on")
    assert open_files() <= files  # what other tests left may go meanwhile


def prompt_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("prompts")}


def until(condition: Callable[[], bool], otherwise: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_requests(load: Load, kind: str, quick_path: Path) -> None:
    soak(load(kind, "float32"), quick_path, 200)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_requests(load: Load, kind: str, quick_path: Path) -> None:
    soak(load(kind, "float32"), quick_path, 2000)
