"""What the two ways of starting, on the CPU and on a GPU, are given and give back. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftengine.config import EngineConfig, Resolved
from ftengine.memory.estimate import WeightSizes
from ftengine.memory.machine import available_memory
from ftengine.scheduler.timeline import Timeline
from ftengine.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ftengine.scheduler.engine import Engine
    from ftengine.weights.source import WeightSource

Progress = Callable[[str, float], None]  # stage, fraction 0..1 of the whole start


@dataclass(frozen=True)
class Beginning:
    """What is known before weights are taken, whatever the device. sizes: of the weights."""

    config: EngineConfig
    checkpoint: Checkpoint
    weights: WeightSource
    sizes: WeightSizes
    threads: Resolved[int]
    dtype: Resolved[str]
    progress: Progress
    timeline: Timeline
    wake: Callable[[], None] = lambda: None  # ends a wait of the step loop for frames; from any thread
    unread: Resolved[int] | None = None  # the memory that was available before reading began; None: it did not yet

    def available(self) -> Resolved[int]:
        """Bytes of memory for weights and all else, those that were read already included, and what bounds them."""
        return self.unread or Resolved(*available_memory())


@dataclass(frozen=True)
class Started:
    """facts: besides those that are known before."""

    engine: Engine
    context: int
    max_running: int
    kv_tokens: int
    facts: dict[str, Resolved[Any]]
