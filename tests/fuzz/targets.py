"""The parsers that strangers' bytes reach first, and small sound inputs to begin with.

Each is made with a folder of its own and gives a function that takes one input, and the seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ftengine.errors import CheckpointError
from tests.fuzz.driver import Execute

Made = tuple[Execute, Sequence[bytes]]
TENSORS = {"model.norm.weight": (8,), "model.layers.0.mlp.gate.weight": (4, 8), "lm_head.weight": (16, 8)}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 16,
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "intermediate_size": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "eos_token_id": [1, 2],
}
SMALL = {"generation_config.json": {"eos_token_id": 1, "temperature": 0.7}, "tokenizer_config.json": {"eos_token": "b"}}


def safetensors(folder: Path) -> Made:
    from safetensors.numpy import save

    from ftengine.weights.header import read_header

    path = folder / "x.safetensors"

    def execute(content: bytes) -> None:
        path.write_bytes(content)
        read_header(path)

    return execute, [save(_arrays(), {"format": "pt"}), save({})]


def gguf(folder: Path) -> Made:
    """The header, then everything that is made of it: configuration, tensor layout, tokenizer."""
    from ftengine.weights.checkpoint import Checkpoint
    from ftengine.weights.gguf_layout import parts

    path = folder / "x.gguf"

    def execute(content: bytes) -> None:
        path.write_bytes(content)
        checkpoint = Checkpoint.open(path)
        assert checkpoint.gguf is not None
        checkpoint.eos_token_ids  # noqa: B018
        parts(checkpoint.gguf.header, checkpoint.config)
        checkpoint.small_files()

    return execute, [_gguf(folder / f"{name}.gguf", name) for name in ("llama", "qwen3moe", "qwen35moe", "other")]


def ftw(folder: Path) -> Made:
    """With the right hash around whatever the header says, else nothing behind the hash would be reached; an input that
    begins with `{"sha256` is taken as it is.
    """
    from ftengine.weights.ftw.header import PREFIX, decode, encode

    sound = encode(_ftw_header())
    inner = sound[sound.index(b'"header":') + 9 : -2]

    def execute(content: bytes) -> None:
        if not content.startswith(PREFIX):
            content = PREFIX + hashlib.sha256(content).hexdigest().encode() + b'","header":' + content + b"}\n"
        decode(content, Path("ftw.json"))

    return execute, [inner, sound]


def config(folder: Path) -> Made:
    from ftengine.models.config import read_config
    from ftengine.models.qwen3_5_moe import Qwen35MoeConfig
    from ftengine.models.rope import rope_scaling
    from ftengine.weights.checkpoint import Checkpoint

    for name, content in SMALL.items():
        (folder / name).write_text(json.dumps(content))
    path = folder / "config.json"

    def execute(content: bytes) -> None:
        path.write_bytes(content)
        checkpoint = Checkpoint.open(folder)
        checkpoint.eos_token_ids  # noqa: B018
        found = read_config(checkpoint, Qwen35MoeConfig)
        rope_scaling(found, theta=1e4, partial=0.25)
        found.kinds()

    nested = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": CONFIG, "vision_config": {}}
    return execute, [json.dumps(CONFIG).encode(), json.dumps(nested).encode()]


def small_files(folder: Path) -> Made:
    """tokenizer_config.json; generation_config.json is read by the same code and has fewer fields."""
    from ftengine.weights.checkpoint import Checkpoint

    (folder / "config.json").write_text(json.dumps(CONFIG))

    def execute(content: bytes) -> None:
        for name in SMALL:
            (folder / name).write_bytes(content)
        checkpoint = Checkpoint.open(folder)
        checkpoint.eos_token_ids  # noqa: B018
        assert checkpoint.chat_template is None or isinstance(checkpoint.chat_template, str)

    decoder = {"3": {"content": "<e>", "special": True}}
    templates = [{"name": "default", "template": "{{ x }}"}, {"name": "tool", "template": "y"}]
    full = {"eos_token": {"content": "<e>"}, "added_tokens_decoder": decoder, "chat_template": templates}
    return execute, [json.dumps(full).encode(), json.dumps({"eos_token": "x", "chat_template": "y"}).encode()]


def index(folder: Path) -> Made:
    from safetensors.numpy import save

    from ftengine.weights.checkpoint import Checkpoint

    (folder / "config.json").write_text(json.dumps(CONFIG))
    arrays = _arrays()
    shards = {
        "model-00001-of-00002.safetensors": list(arrays)[:2],
        "model-00002-of-00002.safetensors": list(arrays)[2:],
    }
    for shard, names in shards.items():
        (folder / shard).write_bytes(save({name: arrays[name] for name in names}))

    def execute(content: bytes) -> None:
        (folder / "model.safetensors.index.json").write_bytes(content)
        Checkpoint.open(folder).tensors()

    weight_map = {name: shard for shard, names in shards.items() for name in names}
    return execute, [json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()]


def tokenizer(folder: Path) -> Made:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    from ftengine.dialect.tokens import TokenCodec

    os.environ["RUST_BACKTRACE"] = "0"  # the library's panics are caught; writing their traces would take the time

    def execute(content: bytes) -> None:
        codec = TokenCodec(content, "{{ '<|im_start|>' }}")
        codec.decoder().feed(codec.encode("a b<|im_end|>"))

    vocabulary = {token: number for number, token in enumerate(["a", "b", "Ġ", "ab", "Ġa", "c"])}
    seeds = []
    for model in (models.BPE(vocab=vocabulary, merges=[("a", "b"), ("Ġ", "a")]), models.WordLevel(vocabulary, "c")):
        made = Tokenizer(model)
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken("<|im_end|>", special=True)])
        seeds.append(made.to_str().encode())
    return execute, seeds


def manifest(folder: Path) -> Made:
    from ftlaunch.store.manifest import NAME, File, Source, damaged, is_complete, read, write

    write(folder, Source("hub", "org/name", "0" * 40, "main"), {"config.json": File(3, "0" * 64)})
    sound = (folder / NAME).read_bytes()

    def execute(content: bytes) -> None:
        (folder / NAME).write_bytes(content)
        found = read(folder)
        damaged(folder)
        is_complete(folder, "x")
        if found is None:
            raise CheckpointError("no manifest")
        assert all(".." not in Path(name).parts and file.size >= 0 for name, file in found.files.items())

    return execute, [sound, b'{"format": 1, "recipe": "x", "files": {"a": 3}}']


TARGETS: dict[str, Callable[[Path], Made]] = {
    "safetensors": safetensors,
    "gguf": gguf,
    "ftw": ftw,
    "config": config,
    "small_files": small_files,
    "index": index,
    "tokenizer": tokenizer,
    "manifest": manifest,
}


def _arrays() -> dict[str, Any]:
    import numpy as np

    return {name: np.zeros(shape, np.float32) for name, shape in TENSORS.items()}


def _gguf(path: Path, architecture: str) -> bytes:
    """Small enough that most damage meets something that matters."""
    import numpy as np
    from gguf import GGUFWriter

    def settings(writer: GGUFWriter) -> None:
        for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
            writer.add_uint32(f"{architecture}.{key}", 8)
        for key in ("attention.head_count", "attention.head_count_kv", "attention.key_length"):
            writer.add_uint32(f"{architecture}.{key}", 2)
        for key in ("expert_count", "expert_used_count"):
            writer.add_uint32(f"{architecture}.{key}", 2)
        for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length", "rope.dimension_count"):
            writer.add_uint32(f"{architecture}.{key}", 2)
        for key in ("inner_size", "state_size", "time_step_rank", "group_count", "conv_kernel"):
            writer.add_uint32(f"{architecture}.ssm.{key}", {"inner_size": 8, "time_step_rank": 4}.get(key, 2))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen35")
        writer.add_token_list(["a", "b", "ab", "<e>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)
        writer.add_chat_template("{{ x }}")

    from tests.support.gguf_files import write

    own = {"qwen35moe": {"blk.0.ssm_a": (4,), "blk.0.ssm_out.weight": (8, 8)}, "llama": {"blk.0.attn_q.weight": (8, 8)}}
    shapes = {"token_embd.weight": (4, 8), "blk.1.ffn_up_exps.weight": (2, 4, 8), **own.get(architecture, {})}
    write(path, architecture, settings, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    return path.read_bytes()


def _ftw_header() -> Any:
    from ftengine.weights.ftw import layout

    digest = "0" * 64
    tensor = layout.TensorSection("norm.weight", (8,), 0, False, 0, 0, digest)
    matrix = layout.TensorSection("lm_head.weight", (16, 64), 2, True, 0, 4096, digest)
    experts = layout.ExpertSection(0, 64, 64, 5, 5, False, 1, 0, (digest, digest))
    return layout.Header(
        version=layout.VERSION,
        architecture="Qwen3MoeForCausalLM",
        origin=layout.Origin("org/name", "", "safetensors"),
        files=(layout.DataFile("dense-00001.ftw", 8192), layout.DataFile("experts-00001.ftw", experts.extent)),
        tensors=(tensor, matrix),
        experts=(experts,),
        attachments=(layout.Attachment("config.json", 10, digest),),
        quantization=(layout.QuantizationError("experts", 5, 2, 0.05, 0.1, "x"),),
    )
