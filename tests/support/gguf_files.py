"""GGUF files for tests, written by the gguf package from tensors in Hugging Face's order.

What llama.cpp's converter does to them is done here in its own way, by reshaping (conversion/llama.py and qwen.py), so
that the reader, which undoes it by index, has an independent counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

Values = dict[str, np.ndarray]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "Ġ t", "Ġt h", "h e", "Ġ Ġ"]


def vocabulary() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "th", "Ġt", "Ġth", "he", "ĠĠ"]


def add_vocabulary(writer: GGUFWriter, pre: str = "qwen2", rows: int | None = None) -> None:
    tokens = vocabulary()
    kinds = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens]
    for number in range(len(tokens), rows or len(tokens)):
        tokens.append(f"[PAD{number}]")
        kinds.append(TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")


def write(
    path: Path,
    architecture: str,
    settings: Callable[[GGUFWriter], None],
    tensors: Values,
    kind: Callable[[str], GGMLQuantizationType] = lambda name: GGMLQuantizationType.F32,
) -> None:
    """tensors: by GGUF name. kind: in which type each is stored."""
    writer = GGUFWriter(path, architecture)
    settings(writer)
    for name, values in tensors.items():
        stored = np.ascontiguousarray(values, dtype=np.float32)
        wanted = kind(name)
        if wanted == GGMLQuantizationType.F32:
            writer.add_tensor(name, stored)
        else:
            writer.add_tensor(name, quantize(stored, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Half a head apart -> neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tiled(values: np.ndarray, key_heads: int, value_heads: int, size: int, axis: int = 0) -> np.ndarray:
    """Value heads grouped by key head -> tiled over them."""
    moved = np.moveaxis(values, axis, 0)
    grouped = moved.reshape(key_heads, value_heads // key_heads, size, *moved.shape[1:])
    return np.moveaxis(grouped.swapaxes(0, 1).reshape(moved.shape), 0, axis)


def common(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """The keys that all architectures have, from a config.json's content."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    add_vocabulary(writer, rows=config["vocab_size"])
