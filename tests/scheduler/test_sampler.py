"""The sampler against its formulas in float64 numpy, written down independently, and against drawn frequencies."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest
import torch

from ftengine.core import SamplingParams
from ftengine.scheduler import sampler
from ftengine.scheduler.sampler import SamplingState, sample

V = 40


def params(**values) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **values})


def logits(seed: int, rows: int = 1, vocabulary: int = V) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def expected_distribution(row: numpy.ndarray, settings: SamplingParams, prompt: list[int], said: list[int]):
    """Probabilities by the order that SamplingParams documents; plain loops in float64."""
    values = row.astype(numpy.float64).copy()
    for token, bias in settings.logit_bias.items():
        values[token] += bias
    for token in set(prompt) | set(said):
        if values[token] > 0:
            values[token] /= settings.repetition_penalty
        else:
            values[token] *= settings.repetition_penalty
    for token in set(said):
        values[token] -= settings.presence_penalty + settings.frequency_penalty * said.count(token)
    if settings.temperature == 0:
        return numpy.eye(len(values))[values.argmax()]
    p = numpy.exp((values - values.max()) / settings.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if settings.top_k:
        for token in order[settings.top_k :]:
            p[token] = 0
        p /= p.sum()
    mass, kept = 0.0, []
    for token in order:
        if kept and mass >= settings.top_p:
            break
        kept.append(token)
        mass += p[token]
    p[[token for token in range(len(p)) if token not in kept]] = 0
    p[p < settings.min_p * p.max()] = 0
    return p / p.sum()


SETTINGS = [
    params(),
    params(temperature=0.0),
    params(temperature=0.6),
    params(temperature=1.7, top_k=5),
    params(top_p=0.8),
    params(top_p=0.9, top_k=7),
    params(top_p=0.0),
    params(min_p=0.1),
    params(min_p=0.2, top_p=0.95, top_k=12, temperature=1.3),
    params(top_k=1),
    params(logit_bias={3: 5.0, 9: -100.0, 20: 2.5}),
    params(repetition_penalty=1.4),
    params(presence_penalty=1.1, frequency_penalty=0.7),
    params(frequency_penalty=-0.8, temperature=0.9),
    params(temperature=0.0, repetition_penalty=1.6, presence_penalty=2.0, logit_bias={5: 3.0}),
    params(temperature=0.7, top_p=0.85, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={1: 1.0}),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("seed", range(3))
def test_support_and_inverse_of_the_cumulative_distribution(settings: SamplingParams, seed: int) -> None:
    """For each of many uniform numbers u the token must be one whose cumulative interval holds u; over all u in a fine
    grid, each token's share of the grid must be its probability."""
    row = logits(seed)
    prompt, said = [2, 3, 3, 8], [8, 11, 11, 30]
    expected = expected_distribution(row[0].numpy(), settings, prompt, said)
    grid = 4000
    states = [SamplingState(settings, prompt, V) for _ in range(grid)]
    for index, state in enumerate(states):
        for token in said:
            state.record(token)
        state.generator = Fixed((index + 0.5) / grid)
    chosen = [choice.token for choice in sample(row.expand(grid, V), states)]
    shares = numpy.bincount(chosen, minlength=V) / grid
    assert numpy.abs(shares - expected).max() <= 1.01 / grid
    assert set(numpy.flatnonzero(shares)) <= set(numpy.flatnonzero(expected))


class Fixed:
    """A generator that draws one known number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def test_a_nucleus_wider_than_what_is_ordered_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same draw with everything ordered at once."""
    settings = params(top_p=0.97, temperature=4.0, seed=1)
    rows = logits(7, rows=50)
    whole = [choice.token for choice in sample(rows, [SamplingState(settings, [], V) for _ in range(50)])]
    monkeypatch.setattr(sampler, "NUCLEUS_WIDTH", 4)
    narrow = [choice.token for choice in sample(rows, [SamplingState(settings, [], V) for _ in range(50)])]
    assert narrow == whole


@pytest.mark.parametrize("seed", range(6))
def test_a_draw_from_all_against_a_sort_of_all(seed: int) -> None:
    """The token at the drawn place of a stable sort, with values that many tokens share, zeros of either sign and
    tokens that are ruled out."""
    row = (2 * logits(seed, vocabulary=600)[0]).round() / 2
    row[torch.arange(0, 600, 3)[row[::3] == 0]] = -0.0
    row[5::7] = -math.inf
    settings = params(top_p=0.9, top_k=300 if seed % 2 else 0, temperature=2.5, min_p=0.001)
    order = sorted(range(600), key=lambda token: (-row[token].item(), token))[: settings.top_k or None]
    weights = numpy.exp((row[order].double().numpy() - row.max().item()) / settings.temperature)
    before = weights.cumsum() - weights
    kept = weights * ((before < settings.top_p * weights.sum()) & (weights >= settings.min_p))
    state = SamplingState(settings, [], 600)
    for step in range(200):
        uniform = (step + 0.5) / 200
        place = numpy.searchsorted(kept.cumsum(), uniform * kept.sum(), side="right")
        assert sampler.draw_from_all(row, state, uniform) == order[place]


def test_drawn_frequencies_fit_the_distribution() -> None:
    """Chi-squared over 20,000 draws from real generators; the bound is passed by chance once in a million."""
    settings = params(temperature=2.0, top_p=0.9)
    row = logits(1)
    expected = expected_distribution(row[0].numpy(), settings, [], [])
    draws = 20_000
    states = [SamplingState(params(temperature=2.0, top_p=0.9, seed=index), [], V) for index in range(draws)]
    counts = numpy.bincount([choice.token for choice in sample(row.expand(draws, V), states)], minlength=V)
    support = expected > 0
    statistic = ((counts - draws * expected)[support] ** 2 / (draws * expected[support])).sum()
    freedom = support.sum() - 1
    assert freedom >= 3
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 12
    assert counts[~support].sum() == 0


def test_successive_draws_of_one_request_are_independent() -> None:
    """The share of equal neighbours against the sum of squared probabilities."""
    state = SamplingState(params(seed=3), [], 4)
    row = torch.zeros(1, 4)
    tokens = [sample(row, [state])[0].token for _ in range(4000)]
    equal = sum(a == b for a, b in itertools.pairwise(tokens)) / 3999
    assert equal == pytest.approx(0.25, abs=0.035)


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_a_row_does_not_depend_on_its_batch(settings: SamplingParams) -> None:
    rows = logits(5, rows=len(SETTINGS) + 1)
    seeded = [SamplingParams(**{**_fields(item), "seed": 4}) for item in [settings, *SETTINGS]]
    together = sample(rows, [SamplingState(item, [1, 2], V) for item in seeded])[0]
    alone = sample(rows[:1], [SamplingState(seeded[0], [1, 2], V)])[0]
    assert together == alone


def _fields(settings: SamplingParams) -> dict:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def test_seed_repeats_and_no_seed_differs() -> None:
    flat = torch.zeros(1, 1000)

    def run(seed: int | None) -> list[int]:
        state = SamplingState(params(seed=seed), [], 1000)
        return [sample(flat, [state])[0].token for _ in range(8)]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(None) != run(None)


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf] * V])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_numbers_give_nothing_and_the_others_their_token(
    bad: list[float], temperature: float
) -> None:
    rows = logits(2, rows=3)
    rows[1, : len(bad)] = torch.tensor(bad)
    choices = sample(rows, [SamplingState(params(temperature=temperature, top_k=1), [], V) for _ in range(3)])
    assert choices[1] is None
    assert [choices[0].token, choices[2].token] == rows[[0, 2]].argmax(-1).tolist()


def test_masked_tokens_are_never_chosen() -> None:
    row = torch.full((1, V), -math.inf)
    row[0, 7] = -50.0
    for settings in SETTINGS[:10]:
        assert sample(row, [SamplingState(settings, [], V)])[0].token == 7


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_the_ends_of_the_unit_interval_choose_no_masked_token(uniform: float) -> None:
    row = torch.full((1, V), -math.inf)
    row[0, 5], row[0, 9] = 1.0, 1.0
    for settings in (params(), params(top_k=30), params(top_p=0.999), params(min_p=0.5)):
        state = SamplingState(settings, [], V)
        state.generator = Fixed(uniform)
        assert sample(row, [state])[0].token in (5, 9)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e6])
def test_extreme_temperatures(temperature: float) -> None:
    rows = 100 * logits(3, rows=4)
    states = [SamplingState(params(temperature=temperature, seed=1), [], V) for _ in range(4)]
    tokens = [choice.token for choice in sample(rows, states)]
    assert all(0 <= token < V for token in tokens)
    if temperature < 1:
        assert tokens == rows.argmax(-1).tolist()


def test_logprobs_are_the_models_own() -> None:
    """Against a float64 log-softmax of the untouched logits."""
    row = logits(4)
    before = row.clone()
    settings = params(temperature=0.5, logit_bias={2: 9.0}, repetition_penalty=1.5, logprobs=3)
    choice = sample(row, [SamplingState(settings, [1], V)])[0]
    values = row[0].numpy().astype(numpy.float64)
    expected = values - numpy.log(numpy.exp(values).sum())
    assert choice.logprob.token == choice.token
    assert choice.logprob.logprob == pytest.approx(expected[choice.token])
    order = sorted(range(V), key=lambda token: -expected[token])[:3]
    assert [token for token, _ in choice.logprob.top] == order
    assert [value for _, value in choice.logprob.top] == pytest.approx(expected[order])
    assert torch.equal(row, before)


def test_logprobs_of_masked_tokens_stay_finite_and_zero_means_none_on_top() -> None:
    row = torch.full((1, 4), -math.inf)
    row[0, 1] = 0
    choice = sample(row, [SamplingState(params(logprobs=20), [], 4)])[0]
    assert [value for _, value in choice.logprob.top] == [0.0, -9999.0, -9999.0, -9999.0]
    assert sample(row, [SamplingState(params(logprobs=0), [], 4)])[0].logprob.top == []
    assert sample(row, [SamplingState(params(), [], 4)])[0].logprob is None
