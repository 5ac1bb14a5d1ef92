"""What the scheduler may expect of a model, and how architectures are found by name.

A model is built by `load(checkpoint, options)` from the table `ARCHITECTURES`; `register` adds to it (an extra
module named in FT_PLUGINS may call it; the tests' scripted model does). Knows nothing of requests' lifetime.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ftengine.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from ftengine.core import Batch, CacheLayout, CacheTensors
    from ftengine.weights.checkpoint import Checkpoint
    from ftengine.weights.source import WeightSource


@dataclass(frozen=True)
class ModelOptions:
    """Resolved by the engine process before loading."""

    dtype: str  # "float32" or "bfloat16"
    device: str = "cpu"
    threads: int = 0  # of the native decoder; 0: torch's own setting
    progress: Callable[[str, float], None] = lambda stage, done: None  # stage, fraction 0..1
    source: WeightSource | None = None  # of the weights; None: what lies in the checkpoint's folder


class Model(Protocol):
    vocab_size: int
    max_context: int  # the checkpoint's own limit (max_position_embeddings), in tokens
    eos_token_ids: tuple[int, ...]
    cache_layout: CacheLayout

    def forward(self, batch: Batch, cache: CacheTensors) -> torch.Tensor:
        """Compute the batch, write its keys, values and states into the cache.

        A sequence whose context length is 0 starts from a zero recurrent state, whatever its slot held before.

        Returns: float32 logits, [len(batch.logits_rows), vocab_size].
        """
        ...


Loader = Callable[["Checkpoint", ModelOptions], Model]

# architecture (config.json "architectures"[0]) -> "module:function"
ARCHITECTURES: dict[str, str | Loader] = {
    "MixtralForCausalLM": "ftengine.models.mixtral:load",
    "Qwen3MoeForCausalLM": "ftengine.models.qwen3_moe:load",
    "Qwen3_5MoeForCausalLM": "ftengine.models.qwen3_5_moe:load",
    "Qwen3_5MoeForConditionalGeneration": "ftengine.models.qwen3_5_moe:load",
}


def register(architecture: str, loader: Loader) -> None:
    ARCHITECTURES[architecture] = loader


def load(checkpoint: Checkpoint, options: ModelOptions) -> Model:
    """Raises CheckpointError for an architecture that is not in the table."""
    entry = ARCHITECTURES.get(checkpoint.architecture)
    if entry is None:
        served = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"the architecture {checkpoint.architecture} is not served (served: {served})", "ft list")
    if isinstance(entry, str):
        module, _, function = entry.partition(":")
        entry = getattr(importlib.import_module(module), function)
    return entry(checkpoint, options)
