"""Packed batches for the mixers' tests, and what mixers should make of them: float64 formulas, one sequence at a time.

Nothing here comes from the engine. Formulas: attention https://arxiv.org/abs/1706.03762, rotary embedding
https://arxiv.org/abs/2104.09864, gated delta rule https://arxiv.org/abs/2412.06464 (token by token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

NAN = float("nan")


@dataclass
class Packed:
    """Sequences of a step: (query tokens, tokens before) each, their pages in random order."""

    parts: list[tuple[int, int]]
    page_size: int
    page_table: torch.Tensor = field(init=False)
    slot_mapping: torch.Tensor = field(init=False)
    pages: int = field(init=False)

    def __post_init__(self) -> None:
        needed = [-(-(length + context) // self.page_size) for length, context in self.parts]
        self.pages = sum(needed) + 3
        order = torch.randperm(self.pages).tolist()
        self.page_table = torch.zeros(len(self.parts), max(needed), dtype=torch.int64)
        slots = []
        for row, ((length, context), count) in enumerate(zip(self.parts, needed, strict=True)):
            self.page_table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
            slots += self.slots(row, range(context, context + length))
        self.slot_mapping = torch.tensor(slots, dtype=torch.int64)

    @property
    def lengths(self) -> list[int]:
        return [length for length, _ in self.parts]

    @property
    def contexts(self) -> list[int]:
        return [context for _, context in self.parts]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def positions(self) -> torch.Tensor:
        return torch.cat([torch.arange(context, context + length) for length, context in self.parts])

    def slots(self, sequence: int, positions: range) -> list[int]:
        table = self.page_table[sequence].tolist()
        return [table[p // self.page_size] * self.page_size + p % self.page_size for p in positions]


@dataclass
class AttentionCase:
    """Random inputs of one attention layer. Cache rows that no token owns are NaN."""

    packed: Packed
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    window: int = 0
    gated: bool = False
    normed: bool = True
    cache: torch.dtype = torch.float32
    extra: int = 0  # columns of `projected` that are nobody's
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        heads = self.heads * (2 if self.gated else 1) + 2 * self.kv_heads
        self.projected = torch.randn(self.packed.tokens, heads * self.dim + self.extra)
        self.norm = 1 + 0.2 * torch.randn(self.heads + self.kv_heads, self.dim) if self.normed else None
        frequencies = 10000.0 ** -(torch.arange(0, self.rotary, 2).double() / max(self.rotary, 1))
        angles = self.packed.positions.double()[:, None] * frequencies
        self.tables = angles.cos().float(), angles.sin().float()
        shape = (self.packed.pages, self.packed.page_size, self.kv_heads, self.dim)
        self.keys, self.values = torch.full(shape, NAN), torch.full(shape, NAN)
        for sequence, context in enumerate(self.packed.contexts):
            slots = self.packed.slots(sequence, range(context))
            self.keys.flatten(0, 1)[slots] = torch.randn(context, self.kv_heads, self.dim)
            self.values.flatten(0, 1)[slots] = torch.randn(context, self.kv_heads, self.dim)
        self.keys, self.values = self.keys.to(self.cache), self.values.to(self.cache)

    def expected(self) -> torch.Tensor:
        """[T, heads * dim] float64. Keys and values are rounded to the cache's dtype, as they are stored in it."""
        rows = self.projected[:, : self.projected.shape[1] - self.extra].double()
        rows = rows.view(self.packed.tokens, -1, self.dim)
        turning, value, gate = rows.tensor_split([self.heads + self.kv_heads, self.heads + 2 * self.kv_heads], dim=1)
        if self.norm is not None:
            turning = turning / (turning.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * self.norm.double()
        turning = self._turn(turning)
        query, key = turning[:, : self.heads], turning[:, self.heads :].to(self.cache).double()
        value = value.to(self.cache).double()
        out = torch.empty(self.packed.tokens, self.heads, self.dim, dtype=torch.float64)
        row = 0
        for sequence, (length, context) in enumerate(self.packed.parts):
            slots = self.packed.slots(sequence, range(context))
            seen_keys = torch.cat((self.keys.flatten(0, 1)[slots].double(), key[row : row + length]))
            seen_values = torch.cat((self.values.flatten(0, 1)[slots].double(), value[row : row + length]))
            for i in range(length):
                last = context + i + 1
                first = max(0, last - self.window) if self.window else 0
                out[row + i] = self._attend(query[row + i], seen_keys[first:last], seen_values[first:last])
            row += length
        if self.gated:
            out = out * gate.sigmoid()
        return out.flatten(1)

    def _turn(self, heads: torch.Tensor) -> torch.Tensor:
        half = self.rotary // 2
        pairs = torch.complex(heads[..., :half], heads[..., half : self.rotary])
        cosine, sine = (table.double()[:, None] for table in self.tables)
        turned = pairs * torch.complex(cosine, sine)
        return torch.cat((turned.real, turned.imag, heads[..., self.rotary :]), dim=-1)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = self.heads // self.kv_heads
        keys, values = (cached.repeat_interleave(group, dim=1) for cached in (keys, values))
        scores = torch.einsum("hd,lhd->hl", query, keys) / math.sqrt(self.dim)
        return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)


@dataclass
class DeltaCase:
    """Random inputs of one Gated DeltaNet layer. Slots of sequences without context are NaN, as are spare ones."""

    parts: list[tuple[int, int]]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    extra: int = 0
    decay: float = 1.0  # magnitude
    epsilon: float = 1e-6
    spare: int = 2  # slots that no sequence has

    def __post_init__(self) -> None:
        self.channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        width = self.channels + self.value_heads * (self.value_dim + 2)
        self.projected = torch.randn(sum(length for length, _ in self.parts), width + self.extra)
        self.taps = torch.randn(self.kernel, self.channels) / self.kernel**0.5
        self.decay_scale = -self.decay * torch.rand(self.value_heads)
        self.decay_bias = torch.randn(self.value_heads)
        self.norm = 1 + 0.2 * torch.randn(self.value_dim)
        slots = len(self.parts) + self.spare
        order = torch.randperm(slots)
        self.slots, self.free = order[: len(self.parts)], order[len(self.parts) :].tolist()
        self.window = torch.full((slots, self.kernel - 1, self.channels), NAN)
        self.state = torch.full((slots, self.value_heads, self.key_dim, self.value_dim), NAN)
        for slot, (_, context) in zip(self.slots.tolist(), self.parts, strict=True):
            if context > 0:
                self.window[slot] = torch.randn(self.window.shape[1:])
                self.state[slot] = torch.randn(self.state.shape[1:]) * 0.3

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output [T, Nv * Dv], window and state after, float64, token by token."""
        window, state = self.window.double(), self.state.double()
        out, row = [], 0
        for slot, (length, context) in zip(self.slots.tolist(), self.parts, strict=True):
            if context == 0:
                window[slot], state[slot] = 0, 0
            tokens = self.projected[row : row + length].double()
            out += [self._token(token, window[slot], state[slot]) for token in tokens]
            row += length
        return torch.stack(out), window, state

    def _token(self, token: torch.Tensor, window: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Changes window [W - 1, C] and state [Nv, Dk, Dv]."""
        heads, size = self.value_heads, self.key_heads * self.key_dim
        sizes = [self.channels, heads * self.value_dim, heads, heads]
        mixed, gate, rate, decay = token[: sum(sizes)].split(sizes)
        inputs = torch.cat((window, mixed[None]))
        window.copy_(inputs[1:])
        summed = (inputs * self.taps.double()).sum(0)
        query, key, value = (summed * summed.sigmoid()).split([size, size, heads * self.value_dim])
        query, key = (self._unit(part) for part in (query, key))
        value = value.view(heads, self.value_dim)
        rate = rate.sigmoid()
        factor = (self.decay_scale.double() * torch.log1p((decay + self.decay_bias.double()).exp())).exp()
        core = torch.empty(heads, self.value_dim, dtype=torch.float64)
        for head in range(heads):
            own = head // (heads // self.key_heads)
            state[head] *= factor[head]
            state[head] += torch.outer(key[own], rate[head] * (value[head] - key[own] @ state[head]))
            core[head] = query[own] @ state[head] / self.key_dim**0.5
        normed = core / (core.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * self.norm.double()
        return (normed * (gate * gate.sigmoid()).view_as(normed)).flatten()

    def _unit(self, part: torch.Tensor) -> torch.Tensor:
        heads = part.view(self.key_heads, self.key_dim)
        return heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
