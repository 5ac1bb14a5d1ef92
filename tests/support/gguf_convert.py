"""A Hugging Face checkpoint to a GGUF file of float32, as llama.cpp's converter would."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import load_file

from tests.support import gguf_files
from tests.support.gguf_files import Values

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {"MixtralForCausalLM": "llama", "Qwen3MoeForCausalLM": "qwen3moe", "Qwen3_5MoeForCausalLM": "qwen35moe"}
MATRICES = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def convert(folder: Path, path: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    config.setdefault("num_experts", config.get("num_local_experts"))
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["rope_theta"] = (config.get("rope_parameters") or {}).get("rope_theta") or config["rope_theta"]
    tensors = _stacked(load_file(folder / "model.safetensors"))
    renamed = dict(_one(name, values, architecture, config) for name, values in tensors.items())
    gguf_files.write(path, architecture, lambda writer: _settings(writer, architecture, config), renamed)
    return path


def _settings(writer: GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    gguf_files.common(writer, config)
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture != "qwen35moe":
        return
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_array("qwen35moe.attention.recurrent_layers", [kind[0] == "l" for kind in config["layer_types"]])


def _stacked(tensors: Values) -> Values:
    """Experts as one tensor a layer and matrix, whichever way they were saved."""
    result: Values = {}
    single: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            single.setdefault(f"{match[1]}.{MATRICES[match[3]]}", {})[int(match[2])] = values
        elif name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix("_up_proj").removesuffix(".gate")
            result[f"{stem}.gate"], result[f"{stem}.up"] = np.split(values, 2, axis=1)
        elif name.endswith(".experts.down_proj"):
            result[name.removesuffix("_proj")] = values
        else:
            result[name] = values
    return result | {name: np.stack([parts[n] for n in range(len(parts))]) for name, parts in single.items()}


def _one(name: str, values: np.ndarray, architecture: str, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    stem, _, ending = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.weight", values + (architecture == "qwen35moe") * ("norm" in stem)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    assert match is not None, name
    layer, rest = match[1], match[2]
    if expert := re.fullmatch(r".+\.experts\.(gate|up|down)", rest):
        return f"blk.{layer}.ffn_{expert[1]}_exps.weight", values
    if rest == "post_attention_layernorm.weight":
        after = "post_attention_norm" if architecture == "qwen35moe" else "ffn_norm"
        return f"blk.{layer}.{after}.weight", values + (architecture == "qwen35moe")
    if "linear_attn." in rest:
        return _delta_net(layer, rest, values, config)
    stem, _, ending = rest.rpartition(".")
    if architecture == "llama" and stem.endswith((".q_proj", ".k_proj")):
        heads = config["num_attention_heads" if "q_" in stem else "num_key_value_heads"]
        values = gguf_files.rotary_rows(values, heads)
    if architecture == "qwen35moe" and stem.endswith("norm"):
        values = values + 1
    if stem.endswith("shared_expert_gate"):
        values = values[0]
    return f"blk.{layer}.{NAMES[stem]}.{ending}", values


def _delta_net(layer: str, rest: str, values: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, kept = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]
    own = rest.removeprefix("linear_attn.").removesuffix(".weight")
    if own in ("A_log", "dt_bias"):
        tiled = gguf_files.tiled(values, keys, heads, 1)
        return (f"blk.{layer}.ssm_a", -np.exp(tiled)) if own == "A_log" else (f"blk.{layer}.ssm_dt.bias", tiled)
    if own in ("in_proj_qkv", "conv1d"):
        values = values.squeeze(1) if own == "conv1d" else values
        values = np.concatenate((values[:kept], gguf_files.tiled(values[kept:], keys, heads, size)))
    elif own in ("in_proj_b", "in_proj_a", "in_proj_z"):
        values = gguf_files.tiled(values, keys, heads, size if own == "in_proj_z" else 1)
    elif own == "out_proj":
        values = gguf_files.tiled(values, keys, heads, size, axis=1)
    return f"blk.{layer}.{NAMES[f'linear_attn.{own}']}.weight", values
