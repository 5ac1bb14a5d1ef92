"""Gated DeltaNet mixer: short causal convolution, gated delta rule, gated norm (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ftengine.core import StateSpec
from ftengine.layers.delta_rule import chunked, recurrent_step
from ftengine.layers.linear import Linear
from ftengine.layers.rms_norm import RmsNorm
from ftengine.layers.step import Span, Step

L2_EPSILON = 1e-6  # under the root, as in the flash-linear-attention library


@dataclass(frozen=True)
class DeltaNetShape:
    key_heads: int  # Nk
    value_heads: int  # Nv, a multiple of Nk
    key_dim: int  # Dk
    value_dim: int  # Dv
    kernel: int  # W, taps of the convolution

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C: queries, keys and values side by side."""
        return 2 * self.key_size + self.value_size

    def states(self) -> tuple[StateSpec, ...]:
        return (
            StateSpec("window", (self.kernel - 1, self.channels), "float32"),
            StateSpec("delta", (self.value_heads, self.key_dim, self.value_dim), "float32"),
        )


@dataclass(frozen=True)
class GatedDeltaNet:
    """One layer.

    projection: [C + Nv * Dv + 2 Nv, H]: queries, keys, values, then the output gate, the rate and the decay input.
    taps: [W, C] float32, oldest first; decay_scale: [Nv] float32, -exp(A_log); decay_bias: [Nv] float32.
    norm: weight [Dv]; out: [H, Nv * Dv].
    """

    shape: DeltaNetShape
    projection: Linear
    taps: torch.Tensor
    decay_scale: torch.Tensor
    decay_bias: torch.Tensor
    norm: RmsNorm
    out: Linear

    def __call__(self, hidden: torch.Tensor, step: Step, states: dict[str, torch.Tensor]) -> torch.Tensor:
        """hidden [T, H] -> float32 [T, H].

        states: this layer's, [slots, ...]; read and written at the sequences' slots, written at captures' slots.
        """
        shape = self.shape
        sizes = [shape.channels, shape.value_size, shape.value_heads, shape.value_heads]
        mixed, gate, rate, decay = torch.split(self.projection(hidden), sizes, dim=1)
        rate = rate.sigmoid()
        decay = F.softplus(decay + self.decay_bias).mul_(self.decay_scale)
        core = hidden.new_empty(hidden.shape[0], shape.value_heads, shape.value_dim, dtype=torch.float32)
        for span in step.prefills:
            rows = span.rows
            core[rows] = self._prefill(span, mixed[rows], decay[rows], rate[rows], step, states)
        if step.decodes:
            at = step.decode_rows
            core[at] = self._decode(mixed[at], decay[at], rate[at], step, states)
            _keep_ends(step, states)
        gate = gate.reshape(core.shape)
        gated = self.norm(core).mul_(F.silu(gate)).flatten(1)
        return self.out(gated.to(hidden.dtype))

    def _prefill(
        self,
        span: Span,
        mixed: torch.Tensor,
        decay: torch.Tensor,
        rate: torch.Tensor,
        step: Step,
        states: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """A chunk of one sequence: mixed [T, C], decay and rate [T, Nv] -> [T, Nv, Dv].

        The delta rule's own chunks begin anew after a capture, as they do in a step that begins there.
        """
        slot = int(step.batch.state_slots[span.index])
        window, state = states["window"][slot], states["delta"][slot]
        if span.context == 0:
            window.zero_()
            state.zero_()
        padded = torch.cat((window, mixed))
        convolved = padded[: span.length] * self.taps[0]
        for tap in range(1, self.shape.kernel):
            convolved.addcmul_(padded[tap : tap + span.length], self.taps[tap])
        query, key, value = (part.transpose(0, 1) for part in self._heads(F.silu(convolved)))
        out, start = torch.empty_like(value), 0
        for end, to in [*((capture.tokens, capture.slot) for capture in span.captures), (span.length, slot)]:
            rows = slice(start, end)
            out[:, rows] = chunked(
                query[:, rows], key[:, rows], value[:, rows], decay.T[:, rows], rate.T[:, rows], state
            )
            states["window"][to], states["delta"][to] = padded[end : end + len(window)], state
            start = end
        return out.transpose(0, 1)

    def _decode(
        self, mixed: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, step: Step, states: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """One token of each of B sequences: mixed [B, C], decay and rate [B, Nv] -> [B, Nv, Dv]."""
        slots = step.batch.state_slots[[span.index for span in step.decodes]]
        fresh = [int(slots[at]) for at, span in enumerate(step.decodes) if span.context == 0]
        if fresh:
            states["window"][fresh] = 0.0
            states["delta"][fresh] = 0.0
        padded = torch.cat((states["window"][slots], mixed.unsqueeze(1)), dim=1)  # [B, W, C]
        states["window"][slots] = padded[:, 1:]
        query, key, value = self._heads(F.silu((padded * self.taps).sum(1)))
        single = len(step.decodes) == 1
        state = states["delta"][int(slots[0])].unsqueeze(0) if single else states["delta"][slots]
        out = recurrent_step(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), decay.flatten(), rate.flatten(),
            state.flatten(0, 1),
        )  # fmt: skip
        if not single:
            states["delta"][slots] = state
        return out.view_as(value)

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, C] -> queries (scaled) and keys [T, Nv, Dk], both of unit length, and values [T, Nv, Dv]."""
        shape = self.shape
        query, key, value = torch.split(convolved, [shape.key_size, shape.key_size, shape.value_size], dim=1)
        repeats = shape.value_heads // shape.key_heads

        def unit(part: torch.Tensor) -> torch.Tensor:
            heads = part.reshape(-1, shape.key_heads, shape.key_dim)
            length = heads.square().sum(-1, keepdim=True).add_(L2_EPSILON).rsqrt_()
            return (heads * length).repeat_interleave(repeats, dim=1)

        return unit(query).mul_(shape.key_dim**-0.5), unit(key), value.reshape(-1, shape.value_heads, shape.value_dim)


def _keep_ends(step: Step, states: dict[str, torch.Tensor]) -> None:
    """Captures of sequences with one token: the states as they are now."""
    for span in step.decodes:
        for capture in span.captures:
            for state in states.values():
                state[capture.slot] = state[int(step.batch.state_slots[span.index])]
