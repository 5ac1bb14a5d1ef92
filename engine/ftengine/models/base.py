"""What the scheduler may expect of a model, and how architectures are found by name.

A model is built by `load(checkpoint, options)` from the table `ARCHITECTURES`; `register` adds to it (an extra
module named in FT_PLUGINS may call it; the tests' scripted model does). Knows nothing of requests' lifetime.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

from ftengine.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from ftengine.core import Batch, CacheLayout, CacheTensors
    from ftengine.weights.checkpoint import Checkpoint
    from ftengine.weights.source import WeightSource

Found = TypeVar("Found")
Collected = TypeVar("Collected", covariant=True)


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


class Pending(Protocol[Collected]):
    """A step that is under way. Collected before the next one is launched, unless that one is launched ahead."""

    def collect(self) -> Collected:
        """Waits for the step's end. Raises what made it fail."""
        ...


@runtime_checkable
class Launching(Protocol):
    """A model whose work goes on while the host does other things."""

    def launch(self, batch: Batch, cache: CacheTensors, sampler: Callable[[torch.Tensor], Found]) -> Pending[Found]:
        """Queues a batch and what `sampler` makes of its logits, and returns at once.

        sampler: called once with the logits [N, vocab_size] as of `forward`, on the model's device, before they are
        computed: it queues its kernels and copies on the current stream and waits for nothing. The logits are the
        model's own buffer until the next launch; the sampler may change them.
        Returns: what `sampler` returned, to be collected when all that was queued is done.
        """
        ...


@runtime_checkable
class LaunchingAhead(Launching, Protocol):
    """A model that can queue a decode step behind the one that computes."""

    rows_ahead: int  # the most sequences of such a step

    def launch_ahead(
        self,
        batch: Batch,
        cache: CacheTensors,
        ids: Callable[[torch.Tensor], None],
        sampler: Callable[[torch.Tensor], Found],
    ) -> Pending[Found]:
        """As `launch`, before the step before is collected; at most these two are under way.

        batch: one token a sequence, input_ids without meaning.
        ids: called with the step's input ids, int32 [B] on the model's device: it queues what fills them.
        """
        ...


@dataclass
class Deferred(Generic[Found]):
    """A step that is computed when it is collected."""

    compute: Callable[[], Found]

    def collect(self) -> Found:
        return self.compute()


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
