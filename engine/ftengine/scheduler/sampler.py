"""Chooses the next tokens from logits: the order of steps is SamplingParams' own.

A request's choices depend on its logits, its parameters and its seed only, never on what else is in the batch: each
draws one uniform number a token from its own generator and inverts its own cumulative distribution with it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import numpy
import torch

from ftengine.core import SamplingParams
from ftengine.wire import LEAST_LOGPROB, TokenLogprob

NUCLEUS_WIDTH = 1024  # tokens looked at for top_p before the whole vocabulary is sorted
LEAST_TEMPERATURE = 1e-30  # float32 divides by it, also where what is below its normal range counts as 0


@dataclass(frozen=True)
class Choice:
    token: int
    logprob: TokenLogprob | None


class SamplingState:
    """What sampling remembers of one request: its random generator and the tokens that penalties look at."""

    def __init__(self, params: SamplingParams, prompt: list[int], vocab_size: int) -> None:
        self.params = params
        self.greedy = params.temperature <= 0
        self.temperature = max(params.temperature, LEAST_TEMPERATURE)
        self.generator = random.Random(params.seed)
        self.wide = False  # the host had to draw a token that a device could not
        self._uniform = 0.0  # the last number drawn
        self._taken_back = False
        self.counts: torch.Tensor | None = None  # [V] float32, of generated tokens
        self.seen: torch.Tensor | None = None  # [V] bool, in prompt or generated
        self.bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if params.presence_penalty or params.frequency_penalty:
            self.counts = torch.zeros(vocab_size)
        if params.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.tensor(prompt)] = True
        if params.logit_bias:
            self.bias = (torch.tensor(list(params.logit_bias)), torch.tensor(list(params.logit_bias.values())).float())

    def move(self, device: torch.device) -> None:
        """To where the logits are."""
        if self.counts is not None:
            self.counts = self.counts.to(device)
        if self.seen is not None:
            self.seen = self.seen.to(device)
        if self.bias is not None:
            self.bias = (self.bias[0].to(device), self.bias[1].to(device))

    def uniform(self) -> float:
        """The next token's random number in [0, 1)."""
        if not self._taken_back:
            self._uniform = self.generator.random()
        self._taken_back = False
        return self._uniform

    def take_back(self) -> None:
        """The last number counts as not drawn: its token was thrown away."""
        self._taken_back = not self.greedy

    @property
    def adjusts(self) -> bool:
        return self.counts is not None or self.seen is not None or self.bias is not None

    def adjust(self, logits: torch.Tensor) -> None:
        """Applies logit_bias and penalties to one row, [V], in place."""
        params = self.params
        if self.bias is not None:
            logits[self.bias[0]] += self.bias[1]
        if self.seen is not None:
            # https://arxiv.org/abs/1909.05858, 4.1; dividing a negative logit would reward it, so it is multiplied
            penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            torch.where(self.seen, penalized, logits, out=logits)
        if self.counts is not None:
            logits -= params.presence_penalty * (self.counts > 0) + params.frequency_penalty * self.counts

    def record(self, token: int) -> None:
        if self.counts is not None:
            self.counts[token] += 1
        if self.seen is not None:
            self.seen[token] = True


def sample(logits: torch.Tensor, states: list[SamplingState]) -> list[Choice | None]:
    """The next token of each row, recorded in its state; None for a row with NaN, +inf or nothing but -inf.

    logits: [N, V] float32, left unchanged.
    """
    # numpy's search takes a twentieth of torch's time; it stops at NaN, and of equals it gives the first.
    values = logits.numpy()
    likeliest = values.argmax(axis=-1)
    usable = numpy.isfinite(values[numpy.arange(len(values)), likeliest]).tolist()
    tokens: list[int | None] = [None] * len(states)
    groups: dict[int, list[int]] = defaultdict(list)
    adjusted = logits.clone() if any(state.adjusts for state in states) else logits
    for row, state in enumerate(states):
        if not usable[row]:
            continue
        if state.adjusts:
            state.adjust(adjusted[row])
        if state.greedy:
            tokens[row] = int(adjusted[row].numpy().argmax()) if state.adjusts else int(likeliest[row])
        else:
            groups[_width(state.params, logits.shape[-1])].append(row)
    for width, rows in groups.items():
        drawn = _draw(_rows(adjusted, rows), [states[row] for row in rows], width)
        for row, drawn_token in zip(rows, drawn, strict=True):
            tokens[row] = drawn_token
    choices: list[Choice | None] = []
    for row, (token, state) in enumerate(zip(tokens, states, strict=True)):
        if token is None:
            choices.append(None)
            continue
        state.record(token)
        wanted = state.params.logprobs
        choices.append(Choice(token, None if wanted is None else token_logprob(logits[row], token, wanted)))
    return choices


def _width(params: SamplingParams, vocab_size: int) -> int:
    """How many of the likeliest tokens a row's choice needs in order; 0: no order needed."""
    if params.top_k > 0:
        return min(params.top_k, vocab_size)
    return min(NUCLEUS_WIDTH, vocab_size) if params.top_p < 1 else 0


def _draw(logits: torch.Tensor, states: list[SamplingState], width: int) -> list[int]:
    """logits: [n, V]. All rows have this `width`; a row's result does not depend on the others."""
    parameters = [state.params for state in states]
    uniform = torch.tensor([state.uniform() for state in states], dtype=torch.float64)
    temperature = torch.tensor([state.temperature for state in states])[:, None]
    min_p = torch.tensor([item.min_p for item in parameters], dtype=torch.float64)[:, None]
    if width == 0:
        weights = _weights(logits, logits.amax(dim=-1, keepdim=True), temperature).double()
        return _invert(weights * (weights >= min_p), uniform).tolist()
    values, ids = logits.topk(width, dim=-1)
    largest = values[:, :1]
    weights = _weights(values, largest, temperature).double()
    total = weights.sum(dim=-1, keepdim=True)
    nucleus = [row for row, item in enumerate(parameters) if not item.top_k]
    if nucleus:  # its share is one of the whole vocabulary
        whole = _weights(_rows(logits, nucleus), largest[nucleus], temperature[nucleus])
        total[nucleus] = whole.sum(dim=-1, keepdim=True, dtype=torch.float64)
    target = torch.tensor([item.top_p for item in parameters], dtype=torch.float64)[:, None] * total
    keep = (weights.cumsum(dim=-1) - weights < target) & (weights >= min_p)
    keep[:, 0] = True
    chosen: list[int] = ids.gather(1, _invert(weights * keep, uniform)[:, None])[:, 0].tolist()
    for row in nucleus if width < logits.shape[-1] else ():
        if weights[row].sum() < target[row]:  # wider than what was ordered: order everything, for the same number
            chosen[row] = draw_from_all(logits[row], states[row], float(uniform[row]))
    return chosen


def _weights(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities as multiples of the likeliest token's, which has 1."""
    return ((logits - largest) / temperature).exp_()


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Without a copy if these are all of them, in order."""
    return logits if len(rows) == len(logits) else logits[rows]


def draw_from_all(logits: torch.Tensor, state: SamplingState, uniform: float) -> int:
    """For a top_k or a nucleus of any width: all values in order, of equal ones the first token first.

    logits: [V] without NaN, adjusted, on any device.
    """
    params = state.params
    ranked = _descending(logits)
    values = ranked[: params.top_k] if params.top_k > 0 else ranked
    weights = _weights(values, values[:1], torch.tensor(state.temperature)).double()
    keep = (weights.cumsum(dim=-1) - weights < params.top_p * weights.sum()) & (weights >= params.min_p)
    keep[0] = True
    drawn = torch.tensor([uniform], dtype=torch.float64, device=logits.device)
    rank = int(_invert((weights * keep)[None], drawn)[0])
    before = int((logits > values[rank]).sum())
    return int((logits == values[rank]).nonzero()[rank - before, 0])


def _descending(logits: torch.Tensor) -> torch.Tensor:
    """The values without their places: on the CPU that takes a third of the time of a sort that keeps both."""
    if logits.device.type != "cpu":
        return logits.sort(descending=True).values
    return torch.from_numpy(numpy.sort(logits.numpy())[::-1].copy())


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index i with cumulative[i-1] <= u * total < cumulative[i]. weights: [n, W] float64; uniform: [n] in [0, 1)."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def token_logprob(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Of the model's own distribution: before bias, penalties and temperature. logits: [V]."""
    logprobs = logits.double().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    ranked = [(index, max(value, LEAST_LOGPROB)) for index, value in zip(ids.tolist(), values.tolist(), strict=True)]
    return TokenLogprob(token, max(float(logprobs[token]), LEAST_LOGPROB), ranked)
