"""Whether csrc's packing, quantizing and dequantizing are there, and on how many threads they run."""

from __future__ import annotations

import torch

try:
    from ftengine import _native
except ImportError:
    NATIVE = False
else:
    NATIVE = hasattr(_native, "quantize")

THREAD_BYTES = 1 << 20  # less is not worth waking another thread


def threads_for(nbytes: int) -> int:
    return torch.get_num_threads() if nbytes >= THREAD_BYTES else 1
