"""What a checkpoint will take in memory, told from its headers and config.json before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ftengine.errors import CheckpointError
from ftengine.memory.plan import WEIGHT_BYTES
from ftengine.weights.checkpoint import Checkpoint


def count_elements(checkpoint: Checkpoint) -> int:
    """Parameters of the checkpoint; 0 if its weights cannot be read, which the loader will say better."""
    try:
        return sum(math.prod(entry.shape) for entry in checkpoint.tensors().values())
    except CheckpointError:
        return 0


def kv_bytes_per_token(text_config: Mapping[str, Any], dtype: str) -> int:
    """Keys and values of one token by the names that Hugging Face configurations share; 0 if they are not there.

    A lower bound to refuse with early: once the model is loaded its CacheLayout says it exactly.
    """

    def number(name: str, otherwise: int = 0) -> int:
        value = text_config.get(name)
        return value if type(value) is int and value > 0 else otherwise

    layers, heads, hidden = number("num_hidden_layers"), number("num_attention_heads"), number("hidden_size")
    head_dim = number("head_dim", hidden // heads if heads else 0)
    kinds = text_config.get("layer_types")
    if isinstance(kinds, list):
        layers = sum(kind != "linear_attention" for kind in kinds)
    else:
        layers //= number("full_attention_interval", 1)
    return 2 * layers * number("num_key_value_heads", heads) * head_dim * WEIGHT_BYTES[dtype]
