"""Complete small model folders, quick to write: for commands that look at models and load none."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ftlaunch.store import manifest

HIDDEN, EXPERTS, INTERMEDIATE, VOCABULARY = 8, 4, 16, 32
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
COMMIT = "1234567890abcdef1234567890abcdef12345678"


def tensors() -> dict[str, np.ndarray]:
    chance = np.random.default_rng(5)
    experts = {
        f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight": (
            (HIDDEN, INTERMEDIATE) if name == "down" else (INTERMEDIATE, HIDDEN)
        )
        for expert in range(EXPERTS)
        for name in ("gate", "up", "down")
    }
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.mlp.gate.weight": (EXPERTS, HIDDEN),
        "model.visual.patch.weight": (3, 5),
        **experts,
    }
    return {name: chance.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def write(folder: Path, *, shards: int = 1, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text('<tool_call>{"name": x, "arguments": y}</tool_call></think>')
    content = tensors()
    if shards == 1:
        save_file(content, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(shards):
        part = {name: content[name] for name in list(content)[number::shards]}
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def store(home: Path, name: str, *, recorded: bool = True, **options: Any) -> Path:
    """As pulled from the Hub, with its manifest."""
    folder = write(home / "models" / name, **options)
    if recorded:
        source = manifest.Source("hub", "org/name", COMMIT, "main")
        manifest.write(folder, source, manifest.hash_files(folder))
    return folder


def cache(root: Path, repo: str, folder: Path, *, revision: str = COMMIT, main: bool = True) -> Path:
    """What huggingface_hub makes of a downloaded model. Returns the snapshot."""
    home = root / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / revision
    for directory in (snapshot, home / "blobs", home / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        content = path.read_bytes()
        large = path.suffix == ".safetensors"
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        blob = home / "blobs" / (hashlib.sha256(content).hexdigest() if large else git)
        blob.write_bytes(content)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    if main:
        (home / "refs" / "main").write_text(revision)
    return snapshot
