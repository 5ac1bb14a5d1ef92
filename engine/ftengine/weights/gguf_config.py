"""A GGUF file's metadata as a model folder's JSON files: config, generation and tokenizer configuration. Torch-free.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and llama.cpp's converter, whose choices are undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftengine.errors import CheckpointError
from ftengine.weights.gguf_header import GgufArray, GgufHeader

# Of an architecture that has no Hugging Face name here; it is listed and described, and refused when it is loaded.
UNKNOWN_PREFIX = "gguf:"
LINEAR, FULL = "linear_attention", "full_attention"
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
}
NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class Keys:
    """Typed reading of one file's metadata. Names without a dot in front are the architecture's own."""

    def __init__(self, header: GgufHeader) -> None:
        self.path = header.path
        self._metadata = header.metadata
        self.architecture = self.text("general.architecture")

    def text(self, name: str) -> str:
        return str(self._require(name, self._metadata.get(name), str))

    def integer(self, name: str, otherwise: int | None = None) -> int:
        """A count; of one that is given layer by layer, the value that all layers with any share."""
        value = self._own(name)
        if isinstance(value, list):
            used = {item for item in value if item}
            if len(used) != 1:
                raise CheckpointError(f"{self.path}: {name} differs between layers, which is not served")
            value = used.pop()
        return int(self._require(name, otherwise if value is None else value, int))

    def number(self, name: str, otherwise: float | None = None) -> float:
        """A float32 in the file: its shortest decimal form is what was meant, 1e-06 and not 9.99999997e-07."""
        value = self._own(name)
        value = self._require(name, otherwise if value is None else value, (int, float))
        return float(f"{value:.7g}")

    def has(self, name: str) -> bool:
        return self._own(name) is not None

    def value(self, name: str) -> Any:
        return self._own(name)

    def token(self, name: str) -> int | None:
        value = self._metadata.get(name)
        return value if type(value) is int else None

    def plain(self, name: str) -> Any:
        """A key that belongs to no architecture."""
        return self._metadata.get(name)

    def _own(self, name: str) -> Any:
        return self._metadata.get(f"{self.architecture}.{name}")

    def _require(self, name: str, value: Any, kind: Any) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"{self.path}: the metadata {name} is {str(value)[:40]}, which is not usable")
        return value


def config(header: GgufHeader) -> dict[str, Any]:
    """config.json's content. Raises CheckpointError for metadata that is missing, odd, or asks for what is not had."""
    keys = Keys(header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path} has no token embedding, so it is not a language model")
    build = ARCHITECTURES.get(keys.architecture)
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    result: dict[str, Any] = {
        "architectures": [f"{UNKNOWN_PREFIX}{keys.architecture}"],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count") - keys.integer("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": keys.integer("attention.key_length", hidden // heads if heads else 0),
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "torch_dtype": "bfloat16",
        **_scaling(keys),
    }
    if keys.has("expert_count"):
        result["num_experts"] = keys.integer("expert_count")
        result["num_experts_per_tok"] = keys.integer("expert_used_count")
    return {**result, **(build(keys) if build else {})}


def _llama(keys: Keys) -> dict[str, Any]:
    own: dict[str, Any] = {"intermediate_size": keys.integer("feed_forward_length"), "sliding_window": None}
    if not keys.value("expert_count"):
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **own}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": keys.integer("expert_count"),
        **own,
    }


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    """llama.cpp computes this architecture with normalized expert weights whatever the checkpoint said."""
    expert = keys.integer("expert_feed_forward_length")
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": keys.integer("feed_forward_length", expert),
        "moe_intermediate_size": expert,
        "norm_topk_prob": True,
    }


def _qwen3_5_moe(keys: Keys) -> dict[str, Any]:
    value_heads = keys.integer("ssm.time_step_rank")
    head_dim, rotary = keys.integer("attention.key_length"), keys.integer("rope.dimension_count")
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": keys.integer("ssm.inner_size") // max(1, value_heads),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "partial_rotary_factor": rotary / max(1, head_dim),
        **_layer_types(keys),
    }


def _layer_types(keys: Keys) -> dict[str, Any]:
    recurrent = keys.value("attention.recurrent_layers")
    if isinstance(recurrent, list):
        return {"layer_types": [LINEAR if item else FULL for item in recurrent]}
    return {"full_attention_interval": keys.integer("full_attention_interval", 4)}


ARCHITECTURES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "llama": _llama,
    "qwen3moe": _qwen3_moe,
    "qwen35moe": _qwen3_5_moe,
}


def _scaling(keys: Keys) -> dict[str, Any]:
    kind = keys.value("rope.scaling.type")
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{keys.path}: rotary embedding of the kind {str(kind)[:40]!r} is not served")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if keys.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{name}"):
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    return {"rope_scaling": scaling}


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """The ids that end an answer, and the sampling that the file recommends, if any."""
    keys = Keys(header)
    ends = [token for name in END_TOKENS if (token := keys.token(name)) is not None]
    result: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    for name, ours in SAMPLING.items():
        value = header.metadata.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            result[ours] = float(f"{value:.7g}") if isinstance(value, float) else value
    if result.keys() & set(SAMPLING.values()):
        result["do_sample"] = True
    return result


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """The named tokens by their text, and the chat template."""
    keys = Keys(header)
    result: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    texts = tokens.values() if isinstance(tokens, GgufArray) else []
    for ours, name in NAMED_TOKENS.items():
        token = keys.token(name)
        if token is not None and 0 <= token < len(texts):
            result[ours] = texts[token]
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        result["chat_template"] = template
    return result
