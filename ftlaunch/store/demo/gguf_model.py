"""The dense model out of a GGUF file of the architecture `llama`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftlaunch.store.demo.dense import Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


class GgufModel:
    def __init__(self, path: Path, origin: str) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.origin = origin
        heads = int(self.field("llama.attention.head_count"))
        hidden = int(self.field("llama.embedding_length"))
        self.shape = Shape(
            vocabulary=len(self.field("tokenizer.ggml.tokens")),
            hidden=hidden,
            intermediate=int(self.field("llama.feed_forward_length")),
            layers=int(self.field("llama.block_count")),
            heads=heads,
            kv_heads=int(self.field("llama.attention.head_count_kv")),
            head_dim=hidden // heads,
            context=int(self.field("llama.context_length")),
            rope_theta=float(self.field("llama.rope.freq_base")),
            norm_eps=float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        )

    def field(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    def tensor(self, name: str) -> NDArray[np.float32]:
        import numpy as np
        from gguf import dequantize

        stored = self._tensors[_gguf_name(name)]
        values: NDArray[np.float32] = np.asarray(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        if ".q_proj." in name:
            return _halves(values, self.shape.heads)
        if ".k_proj." in name:
            return _halves(values, self.shape.kv_heads)
        return values

    def write_tokenizer(self, path: Path) -> None:
        from ftengine.weights.gguf_bpe import CUTS, byte_level_bpe

        tokenizer = byte_level_bpe(
            tokens=self.field("tokenizer.ggml.tokens"),
            kinds=self.field("tokenizer.ggml.token_type"),
            merges=self.field("tokenizer.ggml.merges"),
            cut=CUTS["smollm"],
        )
        tokenizer.save(str(path))


def _gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    match = LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    return f"blk.{match[1]}.{IN_LAYER[match[2]]}.weight"


def _halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """From GGUF's row order within a head, where rotary pairs are neighbours, to Hugging Face's, where they are half a
    head apart. [heads * head_dim, in]
    """
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    halves: NDArray[np.float32] = paired.swapaxes(1, 2).reshape(rows, columns)
    return halves
