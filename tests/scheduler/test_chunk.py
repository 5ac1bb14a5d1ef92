"""The prefill budget against a model with a known speed."""

from __future__ import annotations

import pytest

from ftengine.scheduler.chunk import PrefillBudget


@pytest.mark.parametrize("per_token", [1e-5, 1e-3, 0.01, 0.2])
@pytest.mark.parametrize("fixed", [0.0, 0.05])
def test_steps_settle_just_under_the_time_they_may_take(per_token: float, fixed: float) -> None:
    budget = PrefillBudget(largest=2048, page_size=16, seconds=0.8)
    seconds = []
    for _ in range(40):
        tokens = budget.tokens
        seconds.append(fixed + per_token * tokens)
        budget.measured(tokens, seconds[-1])
        assert budget.tokens % 16 == 0
        assert budget.tokens <= 2 * tokens, "the next chunk may cost more a token than this one"
    least = fixed + per_token * 16
    assert max(seconds[10:]) <= max(0.8, least) * 1.1
    assert seconds[-1] >= min(0.8, fixed + per_token * 2048) * 0.6 or budget.tokens == 16


def test_it_follows_a_prompt_that_gets_slower() -> None:
    """Attention: the cost of a token grows with its position. No step may take more than twice the bound."""
    budget, position = PrefillBudget(2048, 16, 0.8), 0
    while position < 100_000:
        seconds = sum(1e-3 + 1e-7 * (position + token) for token in range(budget.tokens))
        assert seconds < 1.0
        position += budget.tokens
        budget.measured(budget.tokens, seconds)


def test_a_short_quick_chunk_says_nothing_about_a_long_one() -> None:
    budget = PrefillBudget(2048, 16, 0.8)
    for _ in range(10):
        budget.measured(budget.tokens, 0.1)
    assert budget.tokens == 2048
    budget.measured(16, 0.1)
    assert budget.tokens == 2048
    budget.measured(16, 4.0)
    assert budget.tokens == 16


def test_out_of_memory_halves_for_good() -> None:
    budget = PrefillBudget(2048, 16, 0.8)
    for _ in range(10):
        budget.measured(budget.tokens, 0.1)
    budget.halve()
    for _ in range(10):
        budget.measured(budget.tokens, 0.1)
    assert budget.tokens == 1024


def test_never_less_than_a_page() -> None:
    budget = PrefillBudget(1, 16, 0.8)
    budget.halve()
    budget.measured(16, 100)
    assert budget.tokens == 16


@pytest.mark.parametrize("fixed", [0.3, 0.6, 1.0])
def test_a_large_fixed_part_does_not_shrink_chunks_to_nothing(fixed: float) -> None:
    """Busy cores: the engine is idle-fast first, then each step gets a fixed part near the bound."""
    budget, per_token = PrefillBudget(2048, 16, 0.8), 0.01
    for _ in range(10):
        budget.measured(budget.tokens, 2e-3 * budget.tokens)
    seconds, tokens = [], []
    for _ in range(30):
        tokens.append(budget.tokens)
        seconds.append(fixed + per_token * budget.tokens)
        budget.measured(tokens[-1], seconds[-1])
    assert max(seconds[5:]) <= 0.8 * 4
    assert sum(tokens[5:]) / sum(seconds[5:]) >= 0.5 / per_token  # at least half the speed of endless chunks


def test_no_fixed_part_makes_steps_longer_than_four_times_what_was_asked_for() -> None:
    """Most of each step is the fixed part then, and chunks are smaller than would be worthwhile."""
    budget, per_token, seconds = PrefillBudget(2048, 16, 0.8), 0.01, []
    for _ in range(10):
        budget.measured(budget.tokens, 2e-3 * budget.tokens)
    for _ in range(30):
        seconds.append(2.0 + per_token * budget.tokens)
        budget.measured(budget.tokens, seconds[-1])
    assert max(seconds[5:]) <= 0.8 * 4
    assert min(seconds[5:]) >= 0.8 * 3


def test_it_recovers_when_the_cores_are_free_again() -> None:
    budget = PrefillBudget(2048, 16, 0.8)
    for _ in range(20):
        budget.measured(budget.tokens, 0.6 + 0.01 * budget.tokens)
    for _ in range(20):
        budget.measured(budget.tokens, 0.01 + 2e-3 * budget.tokens)
    assert 0.5 <= 0.01 + 2e-3 * budget.tokens <= 0.85
