"""The parts of config.json that the served architectures share, validated. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from ftengine.errors import CheckpointError
from ftengine.weights.checkpoint import Checkpoint

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class DecoderConfig(msgspec.Struct):
    """Field names are config.json's own. Unknown fields are ignored."""

    hidden_size: Size
    num_hidden_layers: Count
    num_attention_heads: Count
    vocab_size: Size
    max_position_embeddings: Size
    num_experts_per_tok: Count
    num_key_value_heads: Count | None = None
    head_dim: Size | None = None
    rms_norm_eps: Positive = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    sliding_window: Size | None = None
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def experts(self) -> int:
        """Checkpoints of one family have it under either name, by the version that wrote them."""
        return self.num_experts or self.num_local_experts or 0


Config = TypeVar("Config", bound=DecoderConfig)


def read_config(checkpoint: Checkpoint, kind: type[Config]) -> Config:
    """Raises CheckpointError for a value that is missing, impossible, or asks for what is not served."""
    where = checkpoint.path / "config.json"
    try:
        config = msgspec.convert(checkpoint.text_config, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if config.hidden_act != "silu":
        raise CheckpointError(f"{where}: the activation {config.hidden_act[:40]!r} is not served, only silu")
    if config.num_attention_heads % config.kv_heads:
        raise CheckpointError(
            f"{where}: {config.num_attention_heads} query heads do not divide into {config.kv_heads} groups"
        )
    if config.experts and config.num_experts_per_tok > config.experts:
        raise CheckpointError(f"{where}: a token is to go to {config.num_experts_per_tok} of {config.experts} experts")
    return config


def tied_embeddings(checkpoint: Checkpoint) -> bool:
    key = "tie_word_embeddings"
    return bool(checkpoint.config.get(key, checkpoint.text_config.get(key, False)))
