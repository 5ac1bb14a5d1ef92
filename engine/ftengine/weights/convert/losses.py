"""How far quantized matrices are from what they were, for each class of tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ftengine.errors import CheckpointError
from ftengine.formats.format import Format
from ftengine.weights.ftw.layout import QuantizationError

# The first that is in the canonical name.
PARTS = (
    (".mlp.experts.", "experts"),
    (".shared_expert", "shared expert"),
    (".self_attn.", "attention"),
    (".linear_attn.", "linear attention"),
    (".mlp.", "feed-forward"),
    ("embed_tokens.", "embedding"),
    ("lm_head.", "output head"),
)


def part_of(name: str) -> str:
    return next((part for key, part in PARTS if key in name), "other")


@dataclass
class Deviation:
    """Of one matrix, summed up block by block: ||q - w|| / ||w|| in the Frobenius norm."""

    name: str
    error: float = 0.0
    size: float = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Both float32, of one shape. Raises CheckpointError for weights that are no numbers."""
        size = torch.linalg.vector_norm(before, dtype=torch.float64).item()
        error = torch.linalg.vector_norm(after - before, dtype=torch.float64).item()
        if not (math.isfinite(size) and math.isfinite(error)):
            raise CheckpointError(f"{self.name} holds NaN, infinity or numbers that are too large to be quantized")
        self.size += size**2
        self.error += error**2

    @property
    def relative(self) -> float:
        return math.sqrt(self.error / self.size) if self.size else math.sqrt(self.error)


class Losses:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[tuple[str, float]]] = {}
        self._lock = threading.Lock()

    def add(self, deviation: Deviation, form: Format) -> None:
        with self._lock:
            key = part_of(deviation.name), form.number
            self._found.setdefault(key, []).append((deviation.name, deviation.relative))

    def summary(self) -> Sequence[QuantizationError]:
        rows = []
        for (part, number), found in sorted(self._found.items()):
            found.sort()  # the same sum and the same worst one, whichever thread came first
            worst = max(found, key=lambda item: item[1])
            mean = math.fsum(relative for _, relative in found) / len(found)
            rows.append(QuantizationError(part, number, len(found), mean, worst[1], worst[0]))
        return rows
