"""The three architectures against transformers on tiny random checkpoints, float32 unless said otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models import driver, tiny

TOLERANCE = 1e-3
PLAIN = ["mixtral", "qwen3", "qwen3.5"]
ALL = [*tiny.KINDS, "qwen3.5-vision"]
Find = Callable[[str], Path]


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, tiny.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("chunk", [1 << 20, 37, 1])
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_logits_and_routes_equal_transformers(checkpoint_of: Find, kind: str, chunk: int, native: bool) -> None:
    """Every position of a prompt of more than one query block and delta-rule chunk; one token at a time for a part."""
    (prompt,) = prompts(60 if chunk == 1 else 300)
    found = driver.compare_with_transformers(checkpoint_of(kind), prompt, chunk=chunk, native=native)
    assert found.logit_spread > 0.5
    assert found.logit_difference < TOLERANCE
    assert found.routes_equal


@pytest.mark.parametrize("kind", PLAIN)
def test_greedy_tokens_equal_transformers_alone_and_batched(checkpoint_of: Find, kind: str) -> None:
    """64 tokens of four sequences of different lengths: in one batch in chunks, each alone, and transformers' own."""
    folder = checkpoint_of(kind)
    model, reference = driver.load_model(folder), driver.load_reference(folder)
    given = prompts(1, 7, 50, 23)
    expected = [driver.reference_generate(reference, prompt, 64) for prompt in given]
    assert driver.generate(model, given, 64, chunk=9) == expected
    assert [driver.generate(model, [prompt], 64)[0] for prompt in given] == expected


@pytest.mark.parametrize("kind", ALL)
def test_a_batch_does_not_change_a_sequence(checkpoint_of: Find, kind: str) -> None:
    """Logits of four sequences prefilled and decoded together against the same alone, every row."""
    model = driver.load_model(checkpoint_of(kind))
    given = prompts(40, 1, 12, 33)
    shared = driver.Driver(model)
    sequences = [shared.add(prompt) for prompt in given]
    collected: list[list[torch.Tensor]] = [[] for _ in given]
    while work := [(s, min(10, len(s.tokens) - s.computed)) for s in sequences if s.computed < len(s.tokens)]:
        rows = torch.split(shared.step(work), [length for _, length in work])
        for (sequence, _), part in zip(work, rows, strict=True):
            collected[sequences.index(sequence)].append(part)
    for prompt, parts in zip(given, collected, strict=True):
        torch.testing.assert_close(torch.cat(parts), driver.prefill_logits(model, prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ALL)
def test_permuted_experts_are_caught(checkpoint_of: Find, kind: str) -> None:
    """The comparison would notice routes that go to the wrong experts."""
    model = driver.load_model(checkpoint_of(kind))
    (prompt,) = prompts(30)
    right = driver.prefill_logits(model, prompt)
    driver.permute_experts(model)
    assert (driver.prefill_logits(model, prompt) - right).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", PLAIN)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(checkpoint_of: Find, kind: str) -> None:
    """Median error of bfloat16 logits against transformers' float32 ones, ours and transformers' own.

    The median, because a token whose router was near a tie goes another way altogether in either.
    """
    folder = checkpoint_of(kind)
    (prompt,) = prompts(120)
    exact = driver.reference_logits(driver.load_reference(folder), prompt)
    theirs = driver.reference_logits(driver.load_reference(folder, torch.bfloat16), prompt)
    ours = driver.prefill_logits(driver.load_model(folder, "bfloat16"), prompt, 50)
    assert (ours - exact).abs().median() < 1.1 * (theirs - exact).abs().median()


def test_pages_of_one_run_and_scattered_ones_give_the_same(checkpoint_of: Find) -> None:
    """Keys are read in place for the former and gathered for the latter."""
    model = driver.load_model(checkpoint_of("mixtral"))
    (prompt,) = prompts(90)
    runs = driver.prefill_logits(model, prompt, 20, shuffled=False)
    torch.testing.assert_close(runs, driver.prefill_logits(model, prompt, 20), atol=1e-5, rtol=0)


def test_a_slot_used_before_starts_from_zero(checkpoint_of: Find) -> None:
    """A recurrent-state slot keeps nothing of the sequence that had it; against a fresh cache."""
    model = driver.load_model(checkpoint_of("qwen3.5"))
    first, second, single = prompts(20, 30, 1)
    used = driver.Driver(model, slots=1)
    used.step([(used.add(first), len(first))])
    for prompt in (second, single):
        used.free_slots.append(0)
        again = used.step([(used.add(prompt), len(prompt))])
        torch.testing.assert_close(again, driver.prefill_logits(model, prompt), atol=1e-5, rtol=0)


def test_a_sequence_of_nan_leaves_its_neighbours_alone(checkpoint_of: Find) -> None:
    """Pages that hold NaN from an earlier sequence are reused in a padded decode batch."""
    model = driver.load_model(checkpoint_of("mixtral"))
    shared = driver.Driver(model, tokens=96, page_size=16)
    for tensor in (*shared.cache.keys, *shared.cache.values):
        assert tensor.isnan().all()
    given = prompts(18, 40)
    sequences = [shared.add(prompt) for prompt in given]
    shared.step([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    decoded = shared.step([(sequence, 1) for sequence in sequences])
    for prompt, row in zip(given, decoded, strict=True):
        torch.testing.assert_close(row, driver.prefill_logits(model, prompt)[-1], atol=TOLERANCE, rtol=0)
