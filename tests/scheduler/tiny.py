"""A small real model for the scheduler's and the cache's tests, with a reference that uses no cache.

One attention layer over all earlier tokens and one recurrent layer, in float64, so that any page, slot or state that
is wrong changes the tokens and rounding does not. It is also a plugin (FT_PLUGINS): its architecture is registered,
with and without the recurrent layer.
"""

from __future__ import annotations

import json
import time
from itertools import accumulate
from pathlib import Path

import numpy
import torch
from safetensors.numpy import save_file

from ftengine.core import Batch, CacheLayout, CacheTensors, StateSpec
from ftengine.models import base

VOCABULARY = 61
HIDDEN = 12
HEADS, HEAD_DIM = 2, 6
DECAY = 0.9
POISON = 60  # a sequence that ends with this token gets NaN logits
BOMB = 59  # computing this token raises
STARVE = 58  # computing this token raises what the CPU allocator raises
PAUSE = 57  # computing this token takes long
LOSS = 56  # computing this token raises what torch does when the device is lost
PAUSE_SECONDS = 30.0
SPECIAL = (POISON, BOMB, STARVE, PAUSE, LOSS)


class TinyModel:
    vocab_size = VOCABULARY

    def __init__(self, *, recurrent: bool, max_context: int = 512, seconds: float = 0.0, seed: int = 5) -> None:
        """seconds: how long a forward lasts at least."""
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.recurrent = recurrent
        self.max_context = max_context
        self.eos_token_ids: tuple[int, ...] = (0,)
        self.seconds = seconds
        self.embedding = weight(VOCABULARY, HIDDEN)
        # Flat scores and large values: every earlier token keeps a say in the logits.
        self.query, self.key = 0.15 * weight(HIDDEN, HIDDEN), 0.15 * weight(HIDDEN, HIDDEN)
        self.value, self.mix = 4 * weight(HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN)
        self.output = weight(HIDDEN, VOCABULARY)
        self.output[:, [0, *SPECIAL]] = 0
        states = ((StateSpec("sum", (HIDDEN,), "float64"), StateSpec("last", (HIDDEN,), "float64")),)
        self.cache_layout = CacheLayout(1, HEADS, HEAD_DIM, "float64", states if recurrent else ())
        self.batches: list[tuple[int, int]] = []  # sequences and tokens of each forward

    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        self.batches.append((len(batch.sequences), len(batch.input_ids)))
        time.sleep(PAUSE_SECONDS if (batch.input_ids == PAUSE).any() else self.seconds)
        if (batch.input_ids == BOMB).any():
            raise ValueError("the bomb went off")
        if (batch.input_ids == STARVE).any():
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        if (batch.input_ids == LOSS).any():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        ends = list(accumulate(batch.query_lengths))
        hidden = torch.cat([self._sequence(batch, cache, i, end) for i, end in enumerate(ends)])
        logits = (hidden @ self.output)[batch.logits_rows]
        logits[batch.input_ids[batch.logits_rows] == POISON] = torch.nan
        return logits.float()

    def _sequence(self, batch: Batch, cache: CacheTensors, i: int, end: int) -> torch.Tensor:
        count, context = batch.query_lengths[i], batch.context_lengths[i]
        rows = slice(end - count, end)
        embedded = self.embedding[batch.input_ids[rows]] + self._position(batch.positions[rows])
        keys, values = cache.keys[0], cache.values[0]
        keys.view(-1, HEADS, HEAD_DIM)[batch.slot_mapping[rows]] = (embedded @ self.key).view(-1, HEADS, HEAD_DIM)
        values.view(-1, HEADS, HEAD_DIM)[batch.slot_mapping[rows]] = (embedded @ self.value).view(-1, HEADS, HEAD_DIM)
        pages = batch.page_table[i, : -(-(context + count) // cache.page_size)]
        found_keys = keys[pages].view(-1, HEADS, HEAD_DIM)[: context + count]
        found_values = values[pages].view(-1, HEADS, HEAD_DIM)[: context + count]
        attended = attention((embedded @ self.query).view(-1, HEADS, HEAD_DIM), found_keys, found_values, context)
        if not self.recurrent:
            return torch.sin(embedded + attended)
        slot = int(batch.state_slots[i])
        total, last = cache.states[0]["sum"], cache.states[0]["last"]
        if context == 0:
            total[slot], last[slot] = 0, 0
        captures = {capture.tokens: capture.slot for capture in batch.captures if capture.row == i}
        carried = []
        for seen, row in enumerate(embedded, 1):
            total[slot] = DECAY * total[slot] + (row + 0.5 * last[slot]) @ self.mix
            last[slot] = row
            carried.append(total[slot].clone())
            if seen in captures:
                total[captures[seen]], last[captures[seen]] = total[slot], last[slot]
        return torch.sin(embedded + attended + 0.3 * torch.stack(carried))

    def reference(self, tokens: list[int]) -> torch.Tensor:
        """The logits after the last of `tokens`, [V], from the whole sequence at once: no pages, chunks or state."""
        embedded = self.embedding[torch.tensor(tokens)] + self._position(torch.arange(len(tokens)))
        split = [(embedded @ weight).view(-1, HEADS, HEAD_DIM) for weight in (self.query, self.key, self.value)]
        hidden = embedded + attention(*split, 0)
        if self.recurrent:
            shifted = torch.cat([torch.zeros(1, HIDDEN, dtype=torch.float64), embedded[:-1]])
            powers = DECAY ** torch.arange(len(tokens) - 1, -1, -1, dtype=torch.float64)
            hidden[-1] += 0.3 * (powers[:, None] * ((embedded + 0.5 * shifted) @ self.mix)).sum(0)
        return (torch.sin(hidden[-1]) @ self.output).float()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.reference(tokens).argmax()))
        return tokens[len(prompt) :]

    def _position(self, positions: torch.Tensor) -> torch.Tensor:
        scale = torch.linspace(0.05, 2.0, HIDDEN, dtype=torch.float64)
        return torch.sin(positions[:, None].double() * scale)


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int) -> torch.Tensor:
    """queries [q, heads, dim] at positions context..; keys, values [context + q, heads, dim] -> [q, heads * dim]."""
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / HEAD_DIM
    visible = torch.arange(len(keys))[None] <= torch.arange(context, context + len(queries))[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def write_checkpoint(folder: Path, *, recurrent: bool = True, **config: object) -> Path:
    """A checkpoint folder that the plugin serves. config: max_position_embeddings, seconds, load_seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    architecture = "TinyRecurrentForTests" if recurrent else "TinyForTests"
    values = {"architectures": [architecture], "vocab_size": VOCABULARY, "max_position_embeddings": 512, **config}
    (folder / "config.json").write_text(json.dumps(values))
    save_file({"unused": numpy.zeros(1, numpy.float32)}, folder / "model.safetensors")
    return folder


def _load(checkpoint: object, options: base.ModelOptions) -> TinyModel:
    config = checkpoint.config  # type: ignore[attr-defined]
    options.progress("reading", 0.5)
    time.sleep(config.get("load_seconds", 0))
    return TinyModel(
        recurrent="Recurrent" in config["architectures"][0],
        max_context=config["max_position_embeddings"],
        seconds=config.get("seconds", 0.0),
    )


base.register("TinyForTests", _load)
base.register("TinyRecurrentForTests", _load)
