"""Tiny checkpoints on the device, driven step by step without a scheduler; the other side is the CPU's decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")

from ftengine.cache.tensors import allocate_cache
from ftengine.models.base import ModelOptions, load
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.setup import GpuSetup
from ftengine.models.gpu.strategy import Strategy
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.source import WeightSource
from tests.models import driver, tiny

PAGES, PAGE_SIZE, SLOTS = 24, 8, 4
PLAIN = ["mixtral", "qwen3", "qwen3.5"]
VOCABULARY = 64

# As small as the kernels' tiles allow: the interpreter takes its time for each program, whatever it computes.
SMALL: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 2, "intermediate_size": 32},
    "qwen3": {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "mlp_only_layers": [1],
    },
    "qwen3.5": {
        "num_hidden_layers": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
}
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def write(kind: str, folder: Path) -> Path:
    changes = {**COMMON, **SMALL[kind]}
    return tiny.write(kind, folder, **{"num_experts_per_tok": 2, **changes})


def prompt_of(length: int, seed: int = 5) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load_gpu(folder: Path, device: str, source: WeightSource | None = None, dtype: str = "float32") -> GpuDecoder:
    options = ModelOptions(dtype=dtype, device="interpret" if device == "cpu" else device, source=source)
    model = load(Checkpoint.open(folder), options)
    assert isinstance(model, GpuDecoder)
    if device == "cuda":  # banks this small do not lie on pages of their own, which could be pinned in place
        pinned = {layer: replace(bank, blocks=bank.blocks.pin_memory()) for layer, bank in model.banks.items()}
        model.banks.update(pinned)
    return model


def setup(strategy: Strategy = "resident", **changes: Any) -> GpuSetup:
    given = {"max_running": 4, "context": PAGES * PAGE_SIZE, "page_size": PAGE_SIZE, "staging": 16, **changes}
    return GpuSetup(strategy, **given)


def start(model: GpuDecoder, pages: int = PAGES) -> driver.Driver:
    """A driver whose cache lies on the model's device, NaN where nothing was written; with graphs if there can be."""
    started = driver.Driver(model, tokens=pages * PAGE_SIZE, page_size=PAGE_SIZE, slots=SLOTS)
    where = "interpret" if model.device.type == "cpu" else str(model.device)
    started.cache = allocate_cache(model.cache_layout, pages, PAGE_SIZE, SLOTS, where)
    for tensor in (*started.cache.keys, *started.cache.values, *started.cache.joined):
        tensor.fill_(float("nan"))
    model.warm_up(started.cache, lambda stage, done: None)
    return started


def logits_of(state: driver.Driver, prompts: list[list[int]], chunk: int, decodes: int) -> list[torch.Tensor]:
    """Each prompt's logits [T, V] on the CPU; all together, up to `chunk` tokens a step, the last `decodes` one by one.

    Prompts of different lengths make steps in which one sequence decodes while another one prefills.
    """
    sequences = [state.add(prompt) for prompt in prompts]
    found: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(prompts))}
    while running := [index for index, each in enumerate(sequences) if each.computed < len(each.tokens)]:
        work = []
        for index in running:
            left = len(prompts[index]) - decodes - sequences[index].computed
            work.append((sequences[index], min(chunk, left) if left > 0 else 1))
        rows = torch.split(state.step(work).cpu(), [length for _, length in work])
        for index, part in zip(running, rows, strict=True):
            found[index].append(part)
    return [torch.cat(parts) for parts in found.values()]
