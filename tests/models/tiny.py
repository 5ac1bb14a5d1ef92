"""Tiny random checkpoints of the served architectures, written by transformers, and rewritten into other namings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    # Wide enough that attention, gates and routers are far from their linear range.
    "initializer_range": 0.15,
}
MIXTRAL = {**COMMON, "num_hidden_layers": 3, "intermediate_size": 96, "num_local_experts": 4}
QWEN3 = {
    **COMMON,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 24,
}
QWEN35 = {
    **COMMON,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}

# name -> (architecture, settings of its config); what a name says is what differs from the family's plain form
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral-window-tied": ("Mixtral", {**MIXTRAL, "sliding_window": 17, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3-dense-among": (
        "Qwen3Moe",
        {**QWEN3, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
    ),
    "qwen3.5": ("Qwen3_5Moe", QWEN35),
}


def write(name: str, folder: Path, **changes: Any) -> Path:
    """Saves the checkpoint of KINDS under `folder`; every parameter is random, norms and biases too."""
    import transformers

    architecture, settings = KINDS[name]
    config_class = getattr(transformers, f"{architecture}{'Text' if architecture == 'Qwen3_5Moe' else ''}Config")
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    return _save(model_class, config_class(**{**settings, **changes}), folder)


def write_with_vision(folder: Path) -> Path:
    import transformers

    text = transformers.Qwen3_5MoeTextConfig(**QWEN35)
    config = transformers.Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=VISION)
    return _save(transformers.Qwen3_5MoeForConditionalGeneration, config, folder)


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    return folder


def rewrite(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A copy of the checkpoint whose tensors went through `change`."""
    target.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, target / file.name)
    tensors = change(load_file(source / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def change_config(folder: Path, **changes: Any) -> None:
    """None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def fused(tensors: dict[str, torch.Tensor], *, transposed: bool = False) -> dict[str, torch.Tensor]:
    """Per-expert names -> fused ones, [E, 2I, H] and [E, H, I], or both transposed."""
    result, experts = {}, {}
    for name, tensor in tensors.items():
        prefix, found, rest = name.partition(".experts.")
        if not found:
            result[name] = tensor
            continue
        number, projection = rest.removesuffix(".weight").split(".")
        experts.setdefault(prefix, {}).setdefault(int(number), {})[projection] = tensor
    for prefix, bank in experts.items():
        names = ("w1", "w3", "w2") if "w1" in bank[0] else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (torch.stack([bank[number][name] for number in sorted(bank)]) for name in names)
        gate_up = torch.cat((gate, up), dim=1)
        if transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        result[f"{prefix}.experts.gate_up_proj"] = gate_up
        result[f"{prefix}.experts.down_proj"] = down
    return result


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int) -> None:
    """Deals the tensors out over `count` files, with an index."""
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    weight_map = {name: names[at % count] for at, name in enumerate(sorted(tensors))}
    for shard in names:
        part = {name: tensors[name] for name, where in weight_map.items() if where == shard}
        save_file(part, folder / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
