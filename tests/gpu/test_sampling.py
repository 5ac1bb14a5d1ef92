"""Sampling on the device against the cumulative distribution in float64 numpy, and against the CPU's sampler."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from ftengine.core import SamplingParams
from ftengine.kernels.triton import sampling
from ftengine.models.base import Deferred
from ftengine.scheduler import device_sampler
from ftengine.scheduler.device_sampler import DeviceSampler
from ftengine.scheduler.sampler import SamplingState, sample, token_logprob
from tests.scheduler.driver import Driver
from tests.scheduler.tiny import POISON, VOCABULARY, TinyModel

V = 530  # 17 blocks of 32, the last one not full; small, because the interpreter is slow
ROUNDING = 2e-5  # of a cumulative probability: float32 exponentials, summed in float64

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "min_p": {"min_p": 0.05},
    "hot_min_p": {"temperature": 1.5, "min_p": 0.001},
    "top_k": {"top_k": 12},
    "qwen": {"temperature": 0.7, "top_k": 10, "top_p": 0.8},
    "nucleus": {"top_p": 0.7, "temperature": 0.5},
    "all": {"temperature": 0.8, "top_k": 11, "top_p": 0.9, "min_p": 0.02},
    "wide_nucleus": {"top_p": 0.99, "temperature": 2.0},
    "wide_top_k": {"top_k": 300},
    "adjusted": {"logit_bias": {7: 6.0, 529: 3.0}, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "adjusted_greedy": {"temperature": 0.0, "logit_bias": {7: 60.0}, "frequency_penalty": 0.2},
}


class Fixed:
    """A generator that draws one known number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def state(uniform: float, vocabulary: int = V, **values) -> SamplingState:
    made = SamplingState(SamplingParams(**{"max_tokens": 1, **values}), [3, 5], vocabulary)
    made.generator = Fixed(uniform)
    return made


def logits(rows: int, seed: int, device: str, vocabulary: int = V, spread: float = 3.0) -> torch.Tensor:
    return (spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))).to(device)


def chosen(values: torch.Tensor, states: list[SamplingState]) -> list[int | None]:
    sampler = DeviceSampler(values.shape[1], len(states), values.device)
    drawn = sampler.queue(values, states)
    if values.is_cuda:
        torch.cuda.synchronize()
    return [None if choice is None else choice.token for choice in drawn.choices()]


def interval(row: torch.Tensor, made: SamplingState, token: int) -> tuple[float, float]:
    """Of the uniform number, for which `token` is the choice: the order of steps of SamplingParams in float64, where
    tokens come by id (no top_k, no top_p) or by probability."""
    params = made.params
    adjusted = row.cpu().clone()
    SamplingState(params, [3, 5], len(row)).adjust(adjusted)
    values = adjusted.double().numpy()
    weights = numpy.exp((values - values.max()) / params.temperature)
    order = numpy.arange(len(values))
    if params.top_k or params.top_p < 1:
        order = numpy.lexsort((order, -values))
    weights = weights[order]
    kept = numpy.ones(len(weights), bool)
    if params.top_k:
        kept[params.top_k :] = False
        weights = weights * kept
    if params.top_p < 1:
        kept &= numpy.cumsum(weights) - weights < params.top_p * weights.sum()
    kept &= weights >= params.min_p
    kept[numpy.argmax(weights)] = True
    weights = weights * kept / (weights * kept).sum()
    place = int(numpy.flatnonzero(order == token)[0])
    assert weights[place] > 0
    end = float(numpy.cumsum(weights)[place])
    return end - weights[place], end


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_interval_holds_the_number_drawn(device: str, name: str) -> None:
    """For numbers all over the unit interval and both its ends, in one batch of different rows."""
    uniforms = [0.0, 0.17, 0.93, math.nextafter(1.0, 0.0)]
    values = logits(len(uniforms), 1, device)
    states = [state(uniform, **SETTINGS[name]) for uniform in uniforms]
    tokens = chosen(values, states)
    for row, (uniform, token) in enumerate(zip(uniforms, tokens, strict=True)):
        assert token is not None
        if states[row].greedy:
            assert token == sample(values[row : row + 1].cpu(), [state(uniform, **SETTINGS[name])])[0].token
        else:
            low, high = interval(values[row], states[row], token)
            assert low - ROUNDING <= uniform <= high + ROUNDING, (uniform, token)


def test_rows_of_every_kind_together_agree_with_the_cpu(device: str) -> None:
    """Where the number drawn is far enough from every boundary, which is nearly everywhere."""
    names = list(SETTINGS)
    values = logits(len(names), 2, device)
    uniforms = numpy.random.default_rng(3).random(len(names)).tolist()

    def states() -> list[SamplingState]:
        return [state(uniform, **SETTINGS[name]) for name, uniform in zip(names, uniforms, strict=True)]

    tokens = chosen(values, states())
    expected = [choice.token for choice in sample(values.cpu(), states())]
    for row, (token, other) in enumerate(zip(tokens, expected, strict=True)):
        if token != other:
            low, high = interval(values[row], states()[row], token)
            assert min(abs(uniforms[row] - low), abs(uniforms[row] - high)) < ROUNDING, names[row]


def test_a_row_does_not_depend_on_its_batch(device: str) -> None:
    names = ["plain", "all", "wide_nucleus", "adjusted", "greedy"]
    values = logits(len(names), 4, device)
    together = chosen(values, [state(0.61, **SETTINGS[name]) for name in names])
    alone = [chosen(values[row : row + 1], [state(0.61, **SETTINGS[name])])[0] for row, name in enumerate(names)]
    assert together == alone


@pytest.mark.parametrize("name", ["greedy", "min_p", "top_k", "wide_top_k"])
def test_rows_that_are_not_numbers_give_nothing_and_the_others_their_token(device: str, name: str) -> None:
    """Against the CPU's choices; a NaN and an infinity in the last block."""
    values = logits(5, 5, device)
    values[1, V - 3] = math.nan
    values[2, V - 2] = math.inf
    values[3] = -math.inf
    tokens = chosen(values, [state(0.5, **SETTINGS[name]) for _ in range(5)])
    expected = sample(values.cpu(), [state(0.5, **SETTINGS[name]) for _ in range(5)])
    assert tokens[1:4] == expected[1:4] == [None] * 3
    assert [tokens[0], tokens[4]] == [expected[0].token, expected[4].token]


@pytest.mark.parametrize("name", ["plain", "hot_min_p", "top_k", "nucleus"])
def test_masked_tokens_are_never_chosen(device: str, name: str) -> None:
    values = torch.full((3, V), -math.inf, device=device)
    values[:, 130], values[:, 525] = 1.0, 1.0
    uniforms = [0.0, 0.5, math.nextafter(1.0, 0.0)]
    assert set(chosen(values, [state(uniform, **SETTINGS[name]) for uniform in uniforms])) <= {130, 525}


def test_of_equal_logits_the_first_is_the_likeliest(device: str) -> None:
    """As numpy.argmax; also of both zeros, whose bits differ."""
    values = torch.full((3, V), -1.0, device=device)
    values[0, [410, 300, 529]] = 4.0
    values[1] = 0.0
    values[2, 500], values[2, 400] = 0.0, -0.0
    for settings in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}):
        assert chosen(values, [state(0.99, **settings) for _ in range(3)]) == [300, 0, 400]


@pytest.mark.parametrize("vocabulary", [1, 61, 512, 513])
def test_vocabularies_of_any_size(device: str, vocabulary: int) -> None:
    """Against the interval of every mode."""
    for name in ("greedy", "plain", "qwen"):
        values = logits(1, vocabulary, device, vocabulary)
        made = state(0.42, vocabulary, **SETTINGS[name])
        (token,) = chosen(values, [made])
        if made.greedy:
            assert token == int(values.argmax())
        else:
            low, high = interval(values[0], made, token)
            assert low - ROUNDING <= 0.42 <= high + ROUNDING


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter's numpy
@pytest.mark.parametrize("temperature", [1e-45, 1e6])
def test_extreme_temperatures(device: str, temperature: float) -> None:
    values = logits(1, 8, device, spread=100.0)
    for settings in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        (token,) = chosen(values, [state(0.5, temperature=temperature, **settings)])
        assert token is not None
        if temperature < 1:
            assert token == int(values.argmax())


def test_more_candidates_than_can_be_put_in_order(device: str) -> None:
    """All equal: every token reaches the bound. The choice is then drawn from the whole order."""
    values = torch.zeros(1, V, device=device)
    for settings in ({"top_k": 10}, {"top_p": 0.5}):
        (token,) = chosen(values, [state(0.5, **settings)])
        low, high = interval(values[0], state(0.5, **settings), token)
        assert low - ROUNDING <= 0.5 <= high + ROUNDING


def test_what_is_collected_holds_the_likeliest(device: str) -> None:
    """The kernels' own result, without the fallback: no row of a normal distribution needs it for these."""
    values = logits(4, 9, device)
    sampler = DeviceSampler(V, 4, values.device)
    drawn = sampler.queue(values, [state(0.3, top_k=k) for k in (1, 5, 9, 12)])
    if values.is_cuda:
        torch.cuda.synchronize()
    assert (drawn.tokens >= 0).all()
    assert (sampler._workspace.count.cpu() <= sampling.CANDIDATES).all()


def test_logprobs_are_of_the_models_own_distribution(device: str) -> None:
    values = logits(1, 10, device)
    made = state(0.5, logit_bias={9: 100.0}, logprobs=3)
    sampler = DeviceSampler(V, 1, values.device)
    drawn = sampler.queue(values, [made])
    if values.is_cuda:
        torch.cuda.synchronize()
    (choice,) = drawn.choices()
    expected = values[0].double().log_softmax(-1)
    assert choice.token == 9
    assert choice.logprob.logprob == pytest.approx(float(expected[9]), abs=1e-6)
    assert [token for token, _ in choice.logprob.top] == expected.topk(3).indices.tolist()


def test_an_engine_gives_the_same_answers_with_either_sampler(device: str) -> None:
    """Greedy, seeded, adjusted, and a row that is not numbers, together in batches; logits come from the host."""
    requests = {
        "greedy": {"temperature": 0.0},
        "drawn": {"temperature": 0.9, "seed": 5},
        "ordered": {"temperature": 0.8, "seed": 6, "top_k": 10, "top_p": 0.9},
        "adjusted": {"seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 1},
    }

    def answers(on_device: bool) -> dict[str, list[int]]:
        driver = Driver(OnDevice(device) if on_device else TinyModel(recurrent=True))
        if on_device:
            driver.engine.device_sampler = DeviceSampler(VOCABULARY, 4, torch.device(device))
        for name, values in requests.items():
            driver.submit(name, prompt_of(name), 3, **values)
        driver.submit("bad", [3, 4, POISON], 4)
        driver.run()
        assert "not numbers" in (driver.results["bad"].error or "")
        return {name: driver.results[name].tokens for name in requests}

    assert answers(on_device=True) == answers(on_device=False)


class OnDevice(TinyModel):
    """A step is over when the device has sampled: until then there is nothing to read."""

    def __init__(self, device: str) -> None:
        super().__init__(recurrent=True)
        self.place = device

    def launch(self, batch, cache, sampler) -> Deferred:
        found = sampler(self.forward(batch, cache).to(self.place))

        def collect():
            if self.place == "cuda":
                torch.cuda.synchronize()
            return found

        return Deferred(collect)


def prompt_of(name: str) -> list[int]:
    return [1 + ord(letter) % 50 for letter in name]


def test_warm_up_runs_every_path(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode, rows in order and others, with adjusted logits and logprobs, and handing tokens on."""
    values = logits(1, 11, device)
    launched: list[tuple[int, bool, bool]] = []
    adjusted: list[bool] = []
    handed_on: list[int] = []

    def choose_tokens(given: torch.Tensor, settings: sampling.Settings, *more, ordered: bool, others: bool) -> None:
        launched.append((int(settings.mode[0]), ordered, others))
        adjusted.append(given is not values)
        sampling.choose_tokens(given, settings, *more, ordered=ordered, others=others)

    def hand_on(tokens: torch.Tensor, ids: torch.Tensor) -> None:
        sampling.hand_on(tokens, ids)
        handed_on.append(int(ids[0]))

    monkeypatch.setattr(device_sampler, "choose_tokens", choose_tokens)
    monkeypatch.setattr(device_sampler, "hand_on", hand_on)
    told = []
    monkeypatch.setattr(device_sampler, "token_logprob", lambda *given: told.append(token_logprob(*given)) or told[-1])
    DeviceSampler(V, 2, values.device).warm_up(values)
    modes = (sampling.GREEDY, sampling.PLAIN, sampling.ORDERED, sampling.WHOLE)
    assert {mode for mode, _, _ in launched} == set(modes)
    assert {(ordered, others) for _, ordered, others in launched} == {(True, False), (False, True)}
    assert any(adjusted)
    assert len(told) == len(handed_on) == 1
