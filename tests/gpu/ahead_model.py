"""The scheduler tests' model as a device that works through a stream of its own, as early or as late as it may.

What the host queues happens in order, at times chosen at random; buffers that a device would share are shared.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import torch

from ftengine.kernels.triton.sampling import NOT_A_NUMBER, WIDE
from ftengine.scheduler.device_sampler import DeviceSampler, Drawn
from tests.scheduler.tiny import DECAY, HIDDEN, SPECIAL, TinyModel


class AheadModel(TinyModel):
    """ahead: steps that were launched while another one was under way."""

    rows_ahead = 8

    def __init__(self, *, timing: int, **options) -> None:
        super().__init__(**options)
        self.timing = random.Random(timing)
        self.queued: deque = deque()
        self.under_way = 0
        self.ahead = 0
        self.buffer = torch.full((16, self.vocab_size), torch.nan)

    def launch(self, batch, cache, sampler):
        assert self.under_way == 0, "two steps at once"
        return self._launch(batch, cache, sampler, None)

    def launch_ahead(self, batch, cache, ids, sampler):
        assert self.under_way == 1, "not ahead of one step"
        self.ahead += 1
        return self._launch(batch, cache, sampler, ids)

    def _launch(self, batch, cache, sampler, ids):
        self.under_way += 1
        logits = self.buffer[: len(batch.logits_rows)]
        pending = _Pending(self)

        def compute() -> None:
            if ids is not None:
                numbers = torch.full((len(batch.sequences),), -1, dtype=torch.int32)
                ids(numbers)
                batch.input_ids.copy_(numbers)
            try:
                logits.copy_(self.forward(batch, cache))
            except Exception as error:
                pending.error = error

        self.queued.append(compute)
        pending.found = sampler(logits)
        self.queued.append(pending.end)
        self.work(self.timing.choice([0, 0, 1, 2, 9]))
        return pending

    @torch.inference_mode()
    def work(self, most: int) -> None:
        for _ in range(most):
            if self.queued:
                self.queued.popleft()()

    def drain(self) -> None:
        self.work(len(self.queued))

    def state_after(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the recurrent layer holds after these tokens, which are a sequence's first ones."""
        embedded = self.embedding[torch.tensor(tokens)] + self._position(torch.arange(len(tokens)))
        total, last = torch.zeros(HIDDEN, dtype=torch.float64), torch.zeros(HIDDEN, dtype=torch.float64)
        for row in embedded:
            total, last = DECAY * total + (row + 0.5 * last) @ self.mix, row
        return total, last


class _Pending:
    def __init__(self, model: AheadModel) -> None:
        self.model, self.found, self.done = model, None, False
        self.error: Exception | None = None

    def end(self) -> None:
        self.done = True

    def collect(self):
        self.model.under_way -= 1
        while not self.done:
            self.model.work(1)
        self.model.work(self.model.timing.choice([0, 1, 9]))
        if self.error is not None:
            raise self.error
        return self.found


class QueuedSampler:
    """Draws as the device's sampler does, in the model's stream; leaves some tokens of nucleus requests to the host."""

    device = torch.device("cpu")
    alone = DeviceSampler.alone
    _widest_top_k = 40

    def __init__(self, model: AheadModel) -> None:
        self.model = model
        self.buffers = [(torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.float64)) for _ in range(2)]

    def queue(self, logits, states) -> _Queued:
        self.buffers.reverse()
        out, numbers = self.buffers[0]
        uniform = [0.0 if state.greedy else state.uniform() for state in states]
        numbers[: len(states)] = torch.tensor(uniform, dtype=torch.float64)

        def choose() -> None:
            for row, state in enumerate(states):
                number = float(numbers[row])
                if logits[row].isnan().any():
                    out[row] = NOT_A_NUMBER
                elif state.greedy:
                    out[row] = int(logits[row].argmax())
                elif state.params.top_p < 1 and int(number * 1000) % 9 == 0:
                    out[row] = WIDE
                else:
                    scaled = logits[row].double() / state.temperature
                    scaled[list(SPECIAL)] = -torch.inf
                    cumulative = scaled.softmax(0).cumsum(0)
                    out[row] = min(int((cumulative <= number).sum()), len(cumulative) - 1)

        self.model.queued.append(choose)
        return _Queued(logits, logits, states, uniform, out, True, self.model)


@dataclass
class _Queued(Drawn):
    model: AheadModel

    def keep(self) -> None:
        self.model.queued.append(super().keep)

    def hand_on(self, ids: torch.Tensor) -> None:
        ids.copy_(self.out[: len(ids)].clamp(min=0))
