"""The dense model that the demo is made of, wherever it comes from. Tensors carry Hugging Face's Llama names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # tokens
    rope_theta: float
    norm_eps: float


class Dense(Protocol):
    shape: Shape
    origin: str  # where its weights come from, for the NOTICE

    def tensor(self, name: str) -> NDArray[np.float32]:
        """For example `model.layers.0.self_attn.q_proj.weight`, [out, in]."""
        ...

    def write_tokenizer(self, path: Path) -> None:
        """Write `tokenizer.json`."""
        ...
