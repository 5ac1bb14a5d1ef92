"""Sizes of the cache and its allocation from a model's CacheLayout."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from ftengine.core import CacheTensors

if TYPE_CHECKING:
    import torch

    from ftengine.core import CacheLayout

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1}


def kv_bytes_per_token(layout: CacheLayout) -> int:
    """Bytes of keys and values that one token takes over all layers."""
    return 2 * layout.kv_layers * layout.kv_heads * layout.head_dim * ITEM_BYTES[layout.dtype]


def state_bytes(layout: CacheLayout) -> int:
    """Bytes of one sequence's recurrent state over all layers; 0 for models without one."""
    return sum(math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for layer in layout.states for spec in layer)


def allocate_cache(layout: CacheLayout, pages: int, page_size: int, slots: int, device: str = "cpu") -> CacheTensors:
    """Zero-filled tensors. device: as in ModelOptions.

    After the pages comes one more for each slot, its companion: see cache/node.py's Anchor.

    On the CPU the system gives the memory when a page is first written, not here.

    Zeros matter: a masked position still enters `0 * value` in attention, and `0 * NaN` is NaN.
    On another device there is one page and one slot more, the last ones, which belong to no sequence: a model may
    write there while it prepares itself. The states of all layers lie together.
    """
    spare = int(device != "cpu")
    shape = (pages + slots + spare, page_size, layout.kv_heads, layout.head_dim)
    keys, values = ([_zeros(shape, layout.dtype, device) for _ in range(layout.kv_layers)] for _ in range(2))
    if device == "cpu":
        states = [
            {spec.name: _zeros((slots, *spec.shape), spec.dtype, device) for spec in layer} for layer in layout.states
        ]
        return CacheTensors(page_size, keys, values, states)
    counts = Counter(spec for layer in layout.states for spec in layer)
    joined = {spec: _zeros((count, slots + spare, *spec.shape), spec.dtype, device) for spec, count in counts.items()}
    layers = {spec: iter(tensor) for spec, tensor in joined.items()}
    states = [{spec.name: next(layers[spec]) for spec in layer} for layer in layout.states]
    return CacheTensors(page_size, keys, values, states, list(joined.values()))


def _zeros(shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    # Imported here: who only counts bytes needs no torch.
    import numpy
    import torch

    if device != "cpu":
        return torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu" if device == "interpret" else device)
    # numpy.zeros is calloc: gigabytes in microseconds; torch.zeros writes every byte.
    raw = numpy.zeros(math.prod(shape) * ITEM_BYTES[dtype], dtype=numpy.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape)
