"""Sampling for models whose logits are on a device: queued with the step, read when it has ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from ftengine.core import SamplingParams
from ftengine.kernels.triton.sampling import (
    CANDIDATES,
    GREEDY,
    NOT_A_NUMBER,
    ORDERED,
    PLAIN,
    WHOLE,
    WIDE,
    Settings,
    Workspace,
    block_count,
    choose_tokens,
    hand_on,
)
from ftengine.scheduler.sampler import Choice, SamplingState, draw_from_all, token_logprob


class DeviceSampler:
    """Two steps at a time: the second `queue` after one overwrites what that one's `Drawn` reads."""

    def __init__(self, vocabulary: int, rows: int, device: torch.device) -> None:
        """rows: the most that one step samples."""
        pinned = device.type == "cuda"
        self.device = device
        self._blocks = block_count(vocabulary)
        self._small = vocabulary <= CANDIDATES  # every token can be put in order
        # About 0.7 tokens a block reach the median of the blocks' maxima if chance spread them, 1.4 the lower quartile;
        # likely tokens lie closer together than that, so room is left.
        self._nucleus_bound = max(1, self._blocks // 2)
        self._widest_top_k = vocabulary if self._small else self._blocks * 3 // 4
        self._buffers = [_HostBuffers(rows, pinned) for _ in range(2)]
        self._workspace = Workspace.allocate(rows, vocabulary, device)

    def queue(self, logits: torch.Tensor, states: list[SamplingState]) -> Drawn:
        """Queues the choice of each row's token on the current stream; waits for nothing.

        logits: float32 [N, V], not yet computed perhaps; left unchanged.
        """
        self._buffers.reverse()
        buffers, adjusted = self._buffers[0], logits
        if any(state.adjusts for state in states):
            adjusted = logits.clone()
            for row, state in enumerate(states):
                if state.adjusts:
                    state.move(self.device)
                    state.adjust(adjusted[row])
        uniform = [0.0 if state.greedy else state.uniform() for state in states]
        modes = [self._set(buffers, row, state, uniform[row]) for row, state in enumerate(states)]
        ordered = modes.count(ORDERED)
        choose_tokens(
            adjusted,
            buffers.settings,
            self._workspace,
            buffers.out,
            ordered=ordered > 0,
            others=ordered < len(modes),
        )
        return Drawn(logits, adjusted, states, uniform, buffers.out, ordered > 0)

    def alone(self, state: SamplingState) -> bool:
        """Whether the device chooses without the host, as far as can be known before."""
        plain = not state.adjusts and state.params.logprobs is None
        return plain and not state.wide and (state.greedy or state.params.top_k <= self._widest_top_k)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compiles every kernel and loads every library that a later step may need. logits: float32 [1, V]."""
        for params in (
            SamplingParams(1, temperature=0.0),
            SamplingParams(1, logprobs=1, logit_bias={0: 1.0}, repetition_penalty=1.1, presence_penalty=0.1),
            SamplingParams(1, top_k=2),
            SamplingParams(1, top_k=logits.shape[-1]),
        ):
            drawn = self.queue(logits, [SamplingState(params, [0], logits.shape[-1])])
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            drawn.choices()
        drawn.hand_on(torch.zeros(1, dtype=torch.int32, device=self.device))

    def _set(self, buffers: _HostBuffers, row: int, state: SamplingState, uniform: float) -> int:
        """Writes one row's settings; returns its mode."""
        params = state.params
        if state.greedy:
            mode = GREEDY
        elif params.top_k > self._widest_top_k:
            mode = WHOLE
        else:
            mode = ORDERED if params.top_k > 0 or params.top_p < 1 else PLAIN
        buffers.modes[row] = mode
        buffers.top_ks[row] = params.top_k
        buffers.reaches[row] = self._blocks + 1 if self._small else params.top_k or self._nucleus_bound
        buffers.numbers[row] = (1.0 if state.greedy else state.temperature, params.top_p, params.min_p, uniform)
        return mode


class _HostBuffers:
    """Of one step, which reads and writes them while it computes."""

    def __init__(self, rows: int, pinned: bool) -> None:
        self.settings = Settings.allocate(rows, pinned)
        self.out = torch.zeros(rows, dtype=torch.int32, pin_memory=pinned)
        self.modes, self.top_ks = self.settings.mode.numpy(), self.settings.top_k.numpy()
        self.reaches, self.numbers = self.settings.reach.numpy(), self.settings.numbers.numpy()


@dataclass
class Drawn:
    """What a step sampled, to be read when it has ended and before the next but one is queued."""

    logits: torch.Tensor  # float32 [N, V]
    adjusted: torch.Tensor  # by bias and penalties; `logits` itself where no row has any
    states: list[SamplingState]
    uniform: list[float]  # the number each row's token was drawn with
    out: torch.Tensor  # int32 [at least N], what `choose_tokens` wrote
    ordered: bool  # WIDE may be among it

    @property
    def tokens(self) -> numpy.ndarray:
        return self.out.numpy()

    def keep(self) -> None:
        """Queued before a step that overwrites the logits: what the host may have to draw from is copied."""
        if self.ordered:
            self.adjusted = self.adjusted.clone()

    def hand_on(self, ids: torch.Tensor) -> None:
        """Queues the copy of the tokens to a step's input. ids: int32 [N], on the device."""
        hand_on(self.out, ids)

    def choices(self) -> list[Choice | None]:
        """As sampler.sample: the tokens, recorded in their states; None for a row that is not numbers."""
        found: list[Choice | None] = []
        for row, (token, state) in enumerate(zip(self.tokens.tolist(), self.states, strict=False)):
            if token == NOT_A_NUMBER:
                found.append(None)
                continue
            if token == WIDE:
                state.wide = True
                token = draw_from_all(self.adjusted[row], state, self.uniform[row])
            state.record(token)
            wanted = state.params.logprobs
            found.append(Choice(token, None if wanted is None else token_logprob(self.logits[row], token, wanted)))
        return found
