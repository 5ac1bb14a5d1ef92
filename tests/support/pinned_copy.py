"""What a copy of pinned memory to the GPU moves, by torch alone and a clock of the host."""

from __future__ import annotations

import time

import torch

SIZE, COPIES = 1 << 30, 5  # bytes


def bytes_per_second() -> float:
    """The best of COPIES."""
    source = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(COPIES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, SIZE / (time.perf_counter() - began))
    return best
