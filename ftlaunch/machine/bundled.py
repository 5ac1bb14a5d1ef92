"""Sizes and shapes of the catalogue's models, for an estimate without a network and without their files.

Shapes are those of each model's config.json on the Hub; sizes follow from them as memory/estimate.py reckons, with all
dense matrices in BF16, or for FP8 all but embedding and head in FP8. What a repository really holds may differ a
little: `ft show NAME --fit` reads its headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftengine.bench.shapes import QWEN36
from ftengine.formats.format import BF16, FP8_BLOCK, NVFP4, ExpertLayout, Format
from ftengine.memory.estimate import WeightSizes
from ftengine.memory.plan import resolve_dtype
from ftengine.memory.vram import Demand
from ftlaunch.machine.fit import Model, expert_products

QWEN3: dict[str, Any] = {
    "hidden_size": 2048,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
DEMO: dict[str, Any] = {
    "hidden_size": 576,
    "vocab_size": 49152,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 1536,
}


@dataclass(frozen=True)
class Facts:
    """products: elements of dense matrices but embedding and head. tied: the head is the embedding."""

    architecture: str
    config: dict[str, Any]
    products: int
    experts: Format = BF16
    dense: Format = BF16
    max_context: int = 262144
    tied: bool = False


FACTS = {
    "demo": Facts("MixtralForCausalLM", DEMO, 26_611_200, max_context=8192, tied=True),
    "qwen3.6-35b-a3b": Facts("Qwen3_5MoeForConditionalGeneration", QWEN36, 1_430_077_440),
    "qwen3.6-35b-a3b-fp8": Facts("Qwen3_5MoeForConditionalGeneration", QWEN36, 1_430_077_440, FP8_BLOCK, FP8_BLOCK),
    "qwen3.6-35b-a3b-nvfp4": Facts("Qwen3_5MoeForConditionalGeneration", QWEN36, 1_430_077_440, NVFP4),
    "qwen3-30b-a3b": Facts("Qwen3MoeForCausalLM", QWEN3, 918_552_576, max_context=40960),
    "qwen3-coder-30b-a3b": Facts("Qwen3MoeForCausalLM", QWEN3, 918_552_576),
}


def model(name: str, asked: str = "auto") -> Model:
    """Of a name in FACTS. asked: EngineConfig.dtype."""
    facts = FACTS[name]
    config, hidden = facts.config, facts.config["hidden_size"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    layout = ExpertLayout(hidden, inner, facts.experts, facts.experts)
    layers, experts = config["num_hidden_layers"], config.get("num_experts") or config["num_local_experts"]
    table = config["vocab_size"] * hidden * BF16.bits // 8
    matrices = facts.products * facts.dense.bits // 8
    sizes = WeightSizes(
        dense=table * (1 if facts.tied else 2) + matrices,
        block=layout.block_bytes,
        experts=experts,
        layers=layers,
        banks=layers * experts * layout.block_bytes,
        next_routers=(layers - 1) * experts * hidden * BF16.bits // 8,
    )
    dtype = resolve_dtype(asked, device="cuda").value
    products = facts.products + expert_products(config, layout, layers)
    demand, embedding = Demand.of(sizes, config, dtype, facts.max_context), 0 if facts.tied else table
    return Model(Path(name), facts.architecture, sizes, dtype, demand, layout, config, embedding, products)
