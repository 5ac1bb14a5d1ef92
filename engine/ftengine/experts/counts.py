"""What the expert cache has counted, from the device's counters (kernels/triton/cache_state.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from ftengine.kernels.triton import cache_state as at


@dataclass(frozen=True)
class LayerCounts:
    """Of one MoE layer or of all, since the start. Experts count once a step, however many rows use them."""

    steps: int
    hits: int
    misses: int
    fetched: int  # of the misses, over the link, computed on the GPU
    kept: int  # of the fetched, in a slot
    cpu_experts: int  # of the misses
    cpu_routes: int  # pairs of a row and an expert
    admitted: int  # copied into slots in the background
    staged: int  # over the link in prefill
    seeded: int  # of the staged, kept in a slot
    link_bytes: int  # of all that crossed the link: fetched, admitted, staged, prefetched
    cpu_bytes: int
    waited_ns: int  # that the GPU waited for the CPU
    copied_ns: int  # that copies over the link took but for the prefetched; those in the background run beside others
    prefetched: int  # copied into slots before their layer began
    foretold: int  # of the prefetched, used by that layer: hits

    @property
    def hit_rate(self) -> float:
        """0..1: found in slots where no copy was made for it; 1 where nothing was looked up."""
        looked_up = self.hits + self.misses
        return (self.hits - self.foretold) / looked_up if looked_up else 1.0

    def __add__(self, other: LayerCounts) -> LayerCounts:
        return LayerCounts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class CacheStats:
    """In `total`, steps are steps of a layer, summed over the layers."""

    total: LayerCounts
    layers: tuple[LayerCounts, ...]


def cache_stats(counters: torch.Tensor, block_bytes: Sequence[int]) -> CacheStats:
    """counters: int64 [L, COUNTERS] on the host. block_bytes: of an expert, a layer."""
    layers = []
    for row, size in zip(counters.tolist(), block_bytes, strict=True):
        over_link = row[at.FETCHED.value] + row[at.ADMITTED.value] + row[at.STAGED.value] + row[at.PREFETCHED.value]
        layers.append(
            LayerCounts(
                steps=row[at.STEPS.value],
                hits=row[at.HITS.value],
                misses=row[at.MISSES.value],
                fetched=row[at.FETCHED.value],
                kept=row[at.KEPT.value],
                cpu_experts=row[at.CPU_EXPERTS.value],
                cpu_routes=row[at.CPU_ROUTES.value],
                admitted=row[at.ADMITTED.value],
                staged=row[at.STAGED.value],
                seeded=row[at.SEEDED.value],
                link_bytes=over_link * size,
                cpu_bytes=row[at.CPU_EXPERTS.value] * size,
                waited_ns=row[at.WAITED.value],
                copied_ns=row[at.COPIED.value],
                prefetched=row[at.PREFETCHED.value],
                foretold=row[at.FORETOLD.value],
            )
        )
    total = layers[0]
    for layer in layers[1:]:
        total = total + layer
    return CacheStats(total, tuple(layers))
