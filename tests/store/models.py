"""Small models for the Hub on loopback: sound files around random bytes."""

from __future__ import annotations

import json
import random
import struct

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "max_position_embeddings": 64,
    "vocab_size": 8,
    "num_hidden_layers": 1,
}


def safetensors(tensors: dict[str, int], seed: int = 0) -> bytes:
    """name -> bytes of a U8 tensor."""
    header, start = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + random.Random(seed).randbytes(start)


def model(*shard_bytes: int, seed: int = 0, **config: object) -> dict[str, bytes]:
    """A sharded model: dense weights in the first shard, experts in all."""
    count = len(shard_bytes)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    weight_map, files = {}, {}
    for number, (name, size) in enumerate(zip(names, shard_bytes, strict=True)):
        own = {
            f"model.layers.0.mlp.experts.{number}.up_proj.weight": size // 2,
            f"model.dense.{number}": size - size // 2,
        }
        files[name] = safetensors(own, seed + number)
        weight_map |= dict.fromkeys(own, name)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    files["config.json"] = json.dumps({**CONFIG, **config}).encode()
    files["tokenizer.json"] = json.dumps({"added_tokens": [], "seed": seed}).encode()
    files["README.md"] = b"# A model\n"
    return files
