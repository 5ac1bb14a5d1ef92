"""What a checkpoint will take in memory, told from its headers and config.json before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ftengine.memory.plan import ITEM_BYTES
from ftengine.weights.source import WeightSource


def weight_bytes(source: WeightSource, text_config: Mapping[str, Any]) -> int:
    """Of all weights as they will lie in memory: matrices packed, each in its own format, the rest as float32."""
    total = 0
    for facts in source.tensors().values():
        if len(facts.shape) == 2:
            total += facts.format.matrix_bytes(*facts.shape)
        else:
            total += 4 * math.prod(facts.shape)
    experts = _number(text_config, "num_experts") or _number(text_config, "num_local_experts")
    layouts = filter(None, map(source.expert_layout, range(_number(text_config, "num_hidden_layers"))))
    return total + sum(experts * layout.block_bytes for layout in layouts)


def kv_bytes_per_token(text_config: Mapping[str, Any], dtype: str) -> int:
    """Keys and values of one token by the names that Hugging Face configurations share; 0 if they are not there.

    A lower bound to refuse with early: once the model is loaded its CacheLayout says it exactly.
    """

    def number(name: str, otherwise: int = 0) -> int:
        return _number(text_config, name, otherwise)

    layers, heads, hidden = number("num_hidden_layers"), number("num_attention_heads"), number("hidden_size")
    head_dim = number("head_dim", hidden // heads if heads else 0)
    kinds = text_config.get("layer_types")
    if isinstance(kinds, list):
        layers = sum(kind != "linear_attention" for kind in kinds)
    else:
        layers //= number("full_attention_interval", 1)
    return 2 * layers * number("num_key_value_heads", heads) * head_dim * ITEM_BYTES[dtype]


def _number(text_config: Mapping[str, Any], name: str, otherwise: int = 0) -> int:
    value = text_config.get(name)
    return value if type(value) is int and value > 0 else otherwise
