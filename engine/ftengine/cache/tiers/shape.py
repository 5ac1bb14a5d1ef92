"""How many bytes the parts of a record take, from a model's CacheLayout. Torch-free.

Keys and values of n tokens lie as [keys of layer 0, values of layer 0, keys of layer 1, ...], each [n, row]; states as
the layout lists them: layer by layer, tensor by tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftengine.cache.tensors import ITEM_BYTES
from ftengine.cache.tiers.base import CHUNK_TOKENS
from ftengine.core import CacheLayout


@dataclass(frozen=True)
class RecordShape:
    parts: int  # tensors with a row for each token: keys and values of each attention layer
    row_bytes: int  # of one token in one of them
    state_sizes: tuple[int, ...]  # bytes of each recurrent tensor of one slot

    @classmethod
    def of(cls, layout: CacheLayout) -> RecordShape:
        row = layout.kv_heads * layout.head_dim * ITEM_BYTES[layout.dtype]
        sizes = [math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for layer in layout.states for spec in layer]
        return cls(2 * layout.kv_layers, row, tuple(sizes))

    @property
    def token_bytes(self) -> int:
        return self.parts * self.row_bytes

    @property
    def state_bytes(self) -> int:
        return sum(self.state_sizes)

    @property
    def chunk_bytes(self) -> int:
        return CHUNK_TOKENS * self.token_bytes

    @property
    def largest(self) -> int:
        """Bytes of the largest record."""
        return max(self.chunk_bytes, (CHUNK_TOKENS - 1) * self.token_bytes + self.state_bytes)
