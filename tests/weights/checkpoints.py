"""Writes a tiny Qwen3-MoE in a convention, and says what every weight of it means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.weights.conventions import Convention, Tensors, bf16

HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY, HEADS = 160, 96, 3, 64, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": 80,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
}
Naming = Callable[[str], str]
NAMINGS: dict[str, Naming] = {
    "model": lambda name: name if name.startswith("lm_head") else f"model.{name}",
    "language_model": lambda name: name if name.startswith("lm_head") else f"model.language_model.{name}",
    "inside": lambda name: f"language_model.{name}" if name.startswith("lm_head") else f"language_model.model.{name}",
    "bare": lambda name: name,
}


def weights(seed: int = 0) -> Tensors:
    """float32 by canonical name, one expert a tensor."""
    random = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) / shape[-1] ** 0.5

    made = {"embed_tokens": matrix(VOCABULARY, HIDDEN), "lm_head": matrix(VOCABULARY, HIDDEN), "norm": matrix(HIDDEN)}
    for layer in range(2):
        prefix = f"layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}.{norm}"] = 1 + matrix(HIDDEN)
        attention = f"{prefix}.self_attn"
        made |= {f"{attention}.{name}_norm": 1 + matrix(80) for name in "qk"}
        made |= {f"{attention}.{name}_proj": matrix(rows, HIDDEN) for name, rows in (("q", 160), ("k", 80), ("v", 80))}
        made[f"{attention}.o_proj"] = matrix(HIDDEN, 160)
        made[f"{prefix}.mlp.gate"] = matrix(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            block = f"{prefix}.mlp.experts.{expert}"
            made |= {f"{block}.{name}_proj": matrix(INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
            made[f"{block}.down_proj"] = matrix(HIDDEN, INTERMEDIATE)
    return {f"{name}.weight": tensor for name, tensor in made.items()}


def quantizable(name: str) -> bool:
    return name.startswith("layers.") and "norm" not in name and not name.endswith("mlp.gate.weight")


def write(folder: Path, convention: Convention, naming: Naming = NAMINGS["model"]) -> Tensors:
    """The checkpoint, and what its weights mean by canonical name, float32."""
    tensors: Tensors = {naming("layers.0.self_attn.k_proj.k_scale"): torch.tensor(1.0)}
    meaning: Tensors = {}
    for name, weight in weights().items():
        writer = convention.experts if ".experts." in name else convention.dense
        written = writer(weight) if quantizable(name) else bf16(weight)
        base = naming(name).removesuffix("weight")
        tensors |= {f"{base}{leaf}": tensor for leaf, tensor in written.tensors.items()}
        meaning[name] = written.meaning
    save(folder, tensors, {**CONFIG, "quantization_config": convention.config})
    if convention.export is not None:
        export = {"producer": {"name": "modelopt"}, "quantization": convention.export}
        (folder / "hf_quant_config.json").write_text(json.dumps(export))
    return meaning


def save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
