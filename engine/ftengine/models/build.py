"""Building blocks that the architectures' loaders share: from canonical tensor names to layers."""

from __future__ import annotations

import torch

from ftengine.core import CacheLayout, StateSpec
from ftengine.experts.executor import HostExecutor
from ftengine.experts.load import ExpertShape, ProjectionNames, load_bank
from ftengine.experts.pool import ExpertPool
from ftengine.layers.attention import Attention
from ftengine.layers.linear import Embedding, Linear, SwiGlu
from ftengine.layers.moe import MoeLayer, Router, SharedExpert
from ftengine.layers.rms_norm import RmsNorm
from ftengine.layers.rotary import RopeScaling, Rotary
from ftengine.models.base import ModelOptions
from ftengine.models.config import DecoderConfig, tied_embeddings
from ftengine.models.decoder import Decoder, DecoderLayer
from ftengine.models.names import canonical
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.loader import TensorLoader

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_loader(checkpoint: Checkpoint, options: ModelOptions) -> TensorLoader:
    return TensorLoader(checkpoint, DTYPES[options.dtype], canonical, options.progress)


class Builder:
    """Reads one checkpoint's tensors into layers; all expert banks go into one pool.

    one_plus: norm weights on disk are w of (1 + w).
    """

    def __init__(self, loader: TensorLoader, config: DecoderConfig, *, one_plus: bool = False) -> None:
        self.loader = loader
        self.config = config
        self.one_plus = one_plus
        self.executor = HostExecutor(ExpertPool())

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.norm_weight(name, self.config.hidden_size), self.config.rms_norm_eps, self.loader.dtype)

    def norm_weight(self, name: str, size: int) -> torch.Tensor:
        weight = self.loader.take(f"{name}.weight", size, dtype=torch.float32)
        return weight.add_(1.0) if self.one_plus else weight

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        return Linear(self.loader.take(f"{name}.weight", rows, columns))

    def swiglu(self, name: str, intermediate: int) -> SwiGlu:
        hidden = self.config.hidden_size
        parts = [(f"{name}.gate_proj.weight", intermediate), (f"{name}.up_proj.weight", intermediate)]
        return SwiGlu(
            Linear(self.loader.take_rows(parts, hidden)), self.linear(f"{name}.down_proj", hidden, intermediate)
        )

    def moe(
        self,
        layer: int,
        intermediate: int,
        names: ProjectionNames,
        *,
        normalize: bool = True,
        shared: SharedExpert | None = None,
    ) -> MoeLayer:
        config, prefix = self.config, f"layers.{layer}.mlp"
        weight = self.loader.take(f"{prefix}.gate.weight", config.experts, config.hidden_size, dtype=torch.float32)
        shape = ExpertShape(config.experts, config.hidden_size, intermediate)
        self.executor.pool.add(layer, load_bank(self.loader, f"{prefix}.experts", shape, names))
        return MoeLayer(Router(layer, weight, config.num_experts_per_tok, normalize), self.executor, shared)

    def attention(self, layer: int, *, head_norms: bool, gated: bool = False) -> Attention:
        """gated: q_proj's rows are, head by head, D of the query and D of its output gate."""
        config, prefix = self.config, f"layers.{layer}.self_attn"
        heads, kv_heads, size = config.num_attention_heads, config.kv_heads, config.head_size
        query_rows = heads * size * (2 if gated else 1)
        rows = [("q_proj", query_rows), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size)]
        weight = self.loader.take_rows([(f"{prefix}.{name}.weight", count) for name, count in rows], config.hidden_size)
        bias = self._biases(prefix, rows) if config.attention_bias else None
        if gated:
            order = _gates_last(heads, kv_heads, size)
            weight = weight[order]
            bias = bias[order] if bias is not None else None
        out_bias = self.loader.take(f"{prefix}.o_proj.bias", config.hidden_size) if config.attention_bias else None
        out = Linear(self.loader.take(f"{prefix}.o_proj.weight", config.hidden_size, heads * size), out_bias)
        norm = self._head_norm(prefix) if head_norms else None
        return Attention(Linear(weight, bias), out, norm, heads, kv_heads, size, gated)

    def _biases(self, prefix: str, rows: list[tuple[str, int]]) -> torch.Tensor:
        return torch.cat([self.loader.take(f"{prefix}.{name}.bias", count) for name, count in rows])

    def _head_norm(self, prefix: str) -> RmsNorm:
        config = self.config
        query = self.norm_weight(f"{prefix}.q_norm", config.head_size)
        key = self.norm_weight(f"{prefix}.k_norm", config.head_size)
        weight = torch.cat((query.expand(config.num_attention_heads, -1), key.expand(config.kv_heads, -1)))
        return RmsNorm(weight, config.rms_norm_eps, torch.float32)

    def decoder(
        self,
        checkpoint: Checkpoint,
        layers: list[DecoderLayer],
        rope: RopeScaling,
        *,
        states: tuple[tuple[StateSpec, ...], ...] = (),
        window: int | None = None,
    ) -> Decoder:
        """Reads what lies around the layers; raises CheckpointError if a tensor is left over."""
        config = self.config
        embedding = self.loader.take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        norm = self.norm("norm")
        tied = tied_embeddings(checkpoint) and "lm_head.weight" not in self.loader
        head = Linear(embedding) if tied else self.linear("lm_head", config.vocab_size, config.hidden_size)
        self.loader.finish()
        layout = CacheLayout(
            kv_layers=sum(isinstance(layer.mixer, Attention) for layer in layers),
            kv_heads=config.kv_heads,
            head_dim=config.head_size,
            dtype=str(self.loader.dtype).removeprefix("torch."),
            states=states,
        )
        return Decoder(
            vocab_size=config.vocab_size,
            max_context=checkpoint.max_context,
            eos_token_ids=checkpoint.eos_token_ids,
            cache_layout=layout,
            embedding=Embedding(embedding),
            layers=layers,
            norm=norm,
            head=head,
            rotary=Rotary(rope),
            window=window,
        )


def _gates_last(heads: int, kv_heads: int, size: int) -> torch.Tensor:
    """Row order that turns [query 0, gate 0, query 1, gate 1, …, keys, values] into [queries, keys, values, gates]."""
    rows = torch.arange(2 * heads * size).view(heads, 2, size)
    others = torch.arange(2 * heads * size, 2 * (heads + kv_heads) * size)
    return torch.cat((rows[:, 0].flatten(), others, rows[:, 1].flatten()))
