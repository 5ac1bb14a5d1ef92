"""What a model takes in memory: estimated from headers, against the tensors that it then holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ftengine.experts.executor import HostExecutor
from ftengine.memory.estimate import weight_bytes
from ftengine.models.decoder import Decoder
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.open import open_source
from tests.models import driver


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, HostExecutor):
        yield from (bank.blocks for bank in value.pool.banks.values())
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def held_bytes(model: Decoder) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(model)}.values())


@pytest.mark.parametrize("kind", ["mixtral", "mixtral-window-tied", "qwen3", "qwen3.5"])
def test_the_estimate_is_what_the_loaded_model_holds(checkpoint_of: Callable[[str], Path], kind: str) -> None:
    """But for an expert's block being filled up to 4096 bytes, and small vectors repeated a head."""
    checkpoint = Checkpoint.open(checkpoint_of(kind))
    with open_source(checkpoint.path) as source:
        estimated = weight_bytes(source, checkpoint.text_config)
    model = driver.load_model(checkpoint.path, "bfloat16")
    blocks = {bank.data_ptr(): len(bank) for bank in tensors_of(model.layers) if bank.dim() == 2}
    assert estimated <= held_bytes(model) <= estimated + 4096 * sum(blocks.values()) + 16_384


def test_the_native_decoder_holds_no_second_copy(checkpoint_of: Callable[[str], Path]) -> None:
    """Changed in place, a weight changes the native decoder's result."""
    model = driver.load_model(checkpoint_of("qwen3.5"))
    before = driver.prefill_logits(model, [1, 2, 3])
    model.head.parts[0].data.zero_()
    assert before.abs().max() > 0
    assert driver.prefill_logits(model, [1, 2, 3]).abs().max() == 0
