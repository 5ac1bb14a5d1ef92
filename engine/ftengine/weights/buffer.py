"""Host memory that weights stay in: aligned to pages, in large ones where the system gives them."""

from __future__ import annotations

import torch

from ftengine.weights.ranges import aligned_bytes

SMALLEST = 1 << 20  # bytes; below, large pages cannot help


def host_buffer(size: int) -> torch.Tensor:
    """uint8 [size], zero-filled. Kernels that stream weights lose time to address translation in small pages.

    Raises MemoryError.
    """
    if size < SMALLEST:
        return torch.zeros(size, dtype=torch.uint8)
    return torch.from_numpy(aligned_bytes(size))
