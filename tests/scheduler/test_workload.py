"""Hundreds of requests with shared prefixes, cancellations and far too few pages, against cold reference tokens."""

from __future__ import annotations

import random

import pytest

from ftengine.core import FinishReason
from tests.scheduler.driver import Driver
from tests.scheduler.tiny import SPECIAL, VOCABULARY, TinyModel


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
@pytest.mark.parametrize(
    ("pages", "slots", "page_size", "running"), [(24, 6, 4, 4), (60, 20, 4, 6), (19, 8, 5, 3), (90, 9, 1, 4)]
)
def test_random_requests_come_out_as_if_alone(
    recurrent: bool, pages: int, slots: int, page_size: int, running: int
) -> None:
    choose = random.Random(pages)
    model = TinyModel(recurrent=recurrent)
    driver = Driver(model, pages=pages, slots=slots, page_size=page_size, running=running, chunk=4 * page_size)
    context = driver.engine.scheduler.limits.context
    stems = [[choose.randrange(1, VOCABULARY - len(SPECIAL)) for _ in range(30)] for _ in range(4)]
    asked: dict[str, tuple[list[int], int]] = {}
    cancelled: set[str] = set()
    while len(asked) < 120 or driver.engine.has_work:
        if len(asked) < 120 and choose.random() < 0.4:
            name = f"r{len(asked)}"
            asked[name] = (_prompt(choose, stems, asked, driver, context), choose.randrange(1, 16))
            driver.submit(name, *asked[name], logprobs=0)
        if asked and choose.random() < 0.08:
            name = choose.choice(list(asked))
            if driver.results[name].finish is None:
                cancelled.add(name)
            driver.cancel(name)
        driver.step()
        driver.engine.scheduler.check_integrity()
        assert len(driver.engine.scheduler.running) <= running
    statistics = driver.engine.stats()
    assert statistics["tokens"]["cached"] > 0
    assert statistics["cache"]["page_evictions"] > 0
    assert statistics["requests"]["cancelled"] == len(cancelled) > 0
    for name, (prompt, count) in asked.items():
        result = driver.results[name]
        if name in cancelled:
            assert result.finish is FinishReason.CANCELLED
        else:
            assert len(result.tokens) == min(count, context - len(prompt))
        _check(model, prompt, result)
    _check_books(driver)


def _prompt(choose: random.Random, stems: list[list[int]], asked: dict, driver: Driver, context: int) -> list[int]:
    """The start of a stem with its own end, or an earlier request with its answer: the next turn."""
    if asked and choose.random() < 0.5:
        name = choose.choice(list(asked))
        prompt = asked[name][0] + driver.results[name].tokens
    else:
        prompt = choose.choice(stems)[: choose.randrange(1, 31)]
    own = [choose.randrange(1, VOCABULARY - len(SPECIAL)) for _ in range(choose.randrange(1, 12))]
    return (prompt + own)[-(context - 1) :]


def _check(model: TinyModel, prompt: list[int], result) -> None:
    """Tokens and their log probabilities: a cache error too small to change the likeliest token is seen too."""
    tokens = list(prompt)
    for token, logprob in zip(result.tokens, result.logprobs, strict=True):
        expected = model.reference(tokens).double().log_softmax(-1)
        assert token == int(expected.argmax())
        assert logprob.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        tokens.append(token)


def _check_books(driver: Driver) -> None:
    """After the last request nothing is in use; after forgetting the cache everything is free."""
    cache = driver.cache
    assert cache.tree.used == 0
    assert cache.pages.used_count == cache.tree.size
    assert cache.slots.used_count == len(cache.tree.anchors)
    cache.clear()
    assert cache.pages.used_count == cache.slots.used_count == cache.tree.size == 0
    driver.engine.scheduler.check_integrity()
