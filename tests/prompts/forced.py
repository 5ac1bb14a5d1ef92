"""Models that count what they are made to compute, and one whose next tokens are given.

Everything but the choice of tokens is the real model: its forward runs, and then a given token's logit is put above all
others. The sampler cannot miss it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from ftengine.core import Batch, CacheTensors, Request, Sequence
from ftengine.models.base import Model

CERTAIN = 1e6
Answer = Callable[[Request], list[int]]  # what is generated after a request's prompt, end token included


@dataclass
class Work:
    """What one request made the model compute."""

    request: Request
    answer: list[int]
    start: int  # tokens that were there before
    prompt: int = 0  # tokens of the prompt that were computed, each as often as it was
    end: int = 0  # tokens whose keys and values exist after the last step
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # [V] after so many tokens, as the model gave them

    @property
    def path(self) -> list[int]:
        """Of a forced answer that came to its end, tokens whose keys and values exist: the last was only chosen."""
        return [*self.request.prompt, *self.answer[:-1]]


class WatchedModel:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._sequences: dict[Sequence, Work] = {}
        self.work: list[Work] = []  # in the order of their first steps, warm-up left out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        logits = self._model.forward(batch, cache)
        for sequence, count, context in zip(batch.sequences, batch.query_lengths, batch.context_lengths, strict=True):
            work = self._work(sequence, context)
            work.prompt += max(0, min(context + count, sequence.prompt_length) - context)
            work.end = context + count
        ends = list(accumulate(batch.query_lengths))
        for n, row in enumerate(batch.logits_rows.tolist()):
            i = next(i for i, end in enumerate(ends) if row < end)
            self.gave(self._sequences[batch.sequences[i]], logits[n])
        return logits

    def gave(self, work: Work, logits: torch.Tensor) -> None:
        """logits: [V], of the token after `work.end`; to be changed in place."""

    def answer(self, request: Request) -> list[int]:
        return []

    def _work(self, sequence: Sequence, context: int) -> Work:
        if sequence not in self._sequences:
            warm_up = sequence.request.id == "warm-up"
            work = self._sequences[sequence] = Work(
                sequence.request, [] if warm_up else self.answer(sequence.request), context
            )
            self.work += [] if warm_up else [work]
        return self._sequences[sequence]


class ForcedModel(WatchedModel):
    """keep_logits: of each token that is chosen."""

    def __init__(self, model: Model, answer: Answer, *, keep_logits: bool = False) -> None:
        super().__init__(model)
        self._answer = answer
        self._last = model.eos_token_ids[0] if model.eos_token_ids else 0
        self._keep_logits = keep_logits

    def answer(self, request: Request) -> list[int]:
        return self._answer(request)

    def gave(self, work: Work, logits: torch.Tensor) -> None:
        if self._keep_logits:
            work.logits[work.end] = logits.clone()
        at = work.end - len(work.request.prompt)
        logits[work.answer[at] if at < len(work.answer) else self._last] = CERTAIN
