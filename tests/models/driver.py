"""Runs a model without the scheduler: allocates a cache from its layout, packs batches, decodes greedily.

Also the reference's side: `compare_with_transformers` holds a checkpoint's model against transformers.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import torch

from ftengine.core import Batch, CacheLayout, CacheTensors, Capture, Request, SamplingParams, Sequence
from ftengine.experts.executor import ExpertExecutor, Routes
from ftengine.layers.moe import MoeLayer
from ftengine.models.base import Model, ModelOptions, load
from ftengine.models.decoder import Decoder
from ftengine.weights.checkpoint import Checkpoint


def load_model(folder: Path, dtype: str = "float32", *, native: bool = True) -> Decoder:
    """native: with the whole-step decoder where it is built; else layer by layer."""
    model = load(Checkpoint.open(folder), ModelOptions(dtype=dtype))
    assert isinstance(model, Decoder)
    return model if native else dataclasses.replace(model, native=None)


def allocate(layout: CacheLayout, pages: int, page_size: int, slots: int) -> CacheTensors:
    """A cache filled with NaN: whatever a model reads without having written it shows."""
    shape = (pages, page_size, layout.kv_heads, layout.head_dim)
    dtype, nan = getattr(torch, layout.dtype), float("nan")
    return CacheTensors(
        page_size=page_size,
        keys=[torch.full(shape, nan, dtype=dtype) for _ in range(layout.kv_layers)],
        values=[torch.full(shape, nan, dtype=dtype) for _ in range(layout.kv_layers)],
        states=[
            {spec.name: torch.full((slots, *spec.shape), nan, dtype=getattr(torch, spec.dtype)) for spec in specs}
            for specs in layout.states
        ],
    )


class Driver:
    """Holds several sequences over one model and cache. Pages come in shuffled order unless told otherwise."""

    def __init__(
        self, model: Model, *, tokens: int = 1024, page_size: int = 8, slots: int = 8, shuffled: bool = True
    ) -> None:
        self.model = model
        self.page_size = page_size
        pages = -(-tokens // page_size)
        self.cache = allocate(model.cache_layout, pages, page_size, slots)
        self.free_pages = list(range(pages))
        if shuffled:
            random.Random(0).shuffle(self.free_pages)
        self.free_slots = list(range(slots))

    def add(self, prompt: list[int]) -> Sequence:
        request = Request("driver", prompt, SamplingParams(max_tokens=1 << 20, temperature=0.0))
        return Sequence(request, list(prompt), state_slot=self.free_slots.pop())

    def step(
        self,
        work: list[tuple[Sequence, int]],
        *,
        last_rows_only: bool = False,
        captures: list[Capture] | None = None,
    ) -> torch.Tensor:
        """Computes the next `length` tokens of each sequence in one batch. captures: as in Batch.

        Returns logits [T, V] of every row, or [B, V] of each sequence's last one.
        """
        for sequence, length in work:
            needed = -(-(sequence.computed + length) // self.page_size)
            while len(sequence.pages) < needed:
                sequence.pages.append(self.free_pages.pop(0))
        batch = self._batch(work)
        batch.captures = captures or []
        if last_rows_only:
            batch.logits_rows = torch.tensor(batch.query_lengths).cumsum(0) - 1
        logits = self.model.forward(batch, self.cache)
        for sequence, length in work:
            sequence.computed += length
        return logits

    def states(self, slot: int) -> list[torch.Tensor]:
        """Copies of all recurrent tensors of a slot, in the order of the layers."""
        return [tensor[slot].clone() for layer in self.cache.states for tensor in layer.values()]

    def _batch(self, work: list[tuple[Sequence, int]]) -> Batch:
        input_ids, positions, slots = [], [], []
        for sequence, length in work:
            for position in range(sequence.computed, sequence.computed + length):
                input_ids.append(sequence.tokens[position])
                positions.append(position)
                slots.append(sequence.pages[position // self.page_size] * self.page_size + position % self.page_size)
        widest = max(len(sequence.pages) for sequence, _ in work)
        table = [sequence.pages + [0] * (widest - len(sequence.pages)) for sequence, _ in work]
        return Batch(
            sequences=[sequence for sequence, _ in work],
            input_ids=torch.tensor(input_ids),
            positions=torch.tensor(positions),
            query_lengths=[length for _, length in work],
            context_lengths=[sequence.computed for sequence, _ in work],
            page_table=torch.tensor(table),
            slot_mapping=torch.tensor(slots),
            state_slots=torch.tensor([sequence.state_slot for sequence, _ in work]),
            logits_rows=torch.arange(len(input_ids)),
        )


def prefill_logits(model: Model, prompt: list[int], chunk: int = 1 << 20, *, shuffled: bool = True) -> torch.Tensor:
    """Logits of every prompt position, [T, V] float32, computed `chunk` tokens at a time."""
    driver = Driver(model, tokens=len(prompt) + 8, shuffled=shuffled)
    sequence = driver.add(prompt)
    parts = []
    while sequence.computed < len(prompt):
        parts.append(driver.step([(sequence, min(chunk, len(prompt) - sequence.computed))]))
    return torch.cat(parts)


def generate(model: Model, prompts: list[list[int]], tokens: int, chunk: int = 1 << 20) -> list[list[int]]:
    """`tokens` greedy ids after each prompt. All sequences share every batch: one decodes while another prefills."""
    driver = Driver(model, tokens=sum(len(prompt) + tokens + 8 for prompt in prompts))
    sequences = [driver.add(prompt) for prompt in prompts]
    while running := [sequence for sequence in sequences if sequence.generated < tokens]:
        work = [(sequence, min(chunk, len(sequence.tokens) - sequence.computed)) for sequence in running]
        logits = driver.step(work, last_rows_only=True)
        for (sequence, _), row in zip(work, logits, strict=True):
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(int(row.argmax()))
    return [sequence.tokens[sequence.prompt_length :] for sequence in sequences]


class RecordingExecutor:
    """Notes the routes that pass through it, as (layer, expert ids [T, K])."""

    def __init__(self, inner: ExpertExecutor) -> None:
        self.inner = inner
        self.seen: list[tuple[int, torch.Tensor]] = []

    def add_partial(self, hidden: torch.Tensor, routes: Routes, out: torch.Tensor) -> None:
        self.seen.append((routes.layer, routes.expert_ids.clone()))
        self.inner.add_partial(hidden, routes, out)


def router_ids(model: Decoder, prompt: list[int]) -> list[torch.Tensor]:
    """For each MoE layer in order, the chosen expert ids of every prompt token, [T, K], most probable first."""
    recorders = []
    layers = []
    for layer in model.layers:
        feed_forward = layer.feed_forward
        if isinstance(feed_forward, MoeLayer):
            recorders.append(RecordingExecutor(feed_forward.executor))
            feed_forward = dataclasses.replace(feed_forward, executor=recorders[-1])
        layers.append(dataclasses.replace(layer, feed_forward=feed_forward))
    prefill_logits(dataclasses.replace(model, layers=layers, native=None), prompt)
    return [recorder.seen[0][1] for recorder in recorders]


def permute_experts(model: Decoder) -> None:
    """Every expert takes its neighbour's place, as if each route went to the wrong one. Changes the model."""
    banks = {
        id(layer.feed_forward.executor): layer.feed_forward.executor.pool.banks
        for layer in model.layers
        if isinstance(layer.feed_forward, MoeLayer)
    }
    for pool in banks.values():
        for bank in pool.values():
            bank.blocks.copy_(bank.blocks.roll(1, 0))


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of the checkpoint."""
    import transformers

    architecture = Checkpoint.open(folder).architecture
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def reference_logits(reference: Any, prompt: list[int]) -> torch.Tensor:
    return reference(torch.tensor([prompt]), use_cache=False).logits[0].float()


@torch.no_grad()
def reference_generate(reference: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    found = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return found[0, len(prompt) :].tolist()


@torch.no_grad()
def reference_router_ids(reference: Any, prompt: list[int]) -> list[torch.Tensor]:
    """As `router_ids`, from the routers' own return values."""
    seen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _input, output: seen.append(output[2]))
        for module in reference.modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    reference(torch.tensor([prompt]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@dataclasses.dataclass(frozen=True)
class Comparison:
    logit_difference: float  # largest absolute one, over all positions
    logit_spread: float  # standard deviation of the reference's logits: what the difference is to be seen against
    routes_equal: bool  # every token's set of experts in every MoE layer


def compare_with_transformers(
    folder: Path, prompt: list[int], *, chunk: int = 1 << 20, native: bool = True
) -> Comparison:
    """Both models in float32 over the same prompt, ours in chunks."""
    model, reference = load_model(folder, native=native), load_reference(folder)
    ours, theirs = prefill_logits(model, prompt, chunk), reference_logits(reference, prompt)
    our_ids, their_ids = router_ids(model, prompt), reference_router_ids(reference, prompt)
    return Comparison(
        logit_difference=float((ours - theirs).abs().max()),
        logit_spread=float(theirs.std()),
        routes_equal=len(our_ids) == len(their_ids) > 0
        and all(torch.equal(a.sort(-1)[0], b.sort(-1)[0]) for a, b in zip(our_ids, their_ids, strict=True)),
    )
