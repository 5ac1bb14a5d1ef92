"""Building blocks that the architectures' loaders share: from canonical tensor names to layers."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ftengine.core import CacheLayout, StateSpec
from ftengine.experts.executor import HostExecutor
from ftengine.experts.load import BankLoader, ExpertShape, load_one
from ftengine.experts.pool import ExpertPool
from ftengine.formats.matrix import PackedMatrix
from ftengine.layers.attention import Attention
from ftengine.layers.linear import Embedding, Linear, SwiGlu
from ftengine.layers.moe import MoeLayer, Router
from ftengine.layers.rms_norm import RmsNorm
from ftengine.layers.rotary import RopeScaling, Rotary
from ftengine.models.base import Model, ModelOptions
from ftengine.models.config import DecoderConfig, tied_embeddings
from ftengine.models.decoder import Decoder, DecoderLayer
from ftengine.models.native_decoder import native_decoder
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.loader import WeightLoader
from ftengine.weights.open import open_source
from ftengine.weights.stack import halves_apart, part, stack

if TYPE_CHECKING:
    from ftengine.models.gpu.upload import Uploader

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Builder:
    """Reads one checkpoint's tensors into layers; all expert banks go into one pool. Use as a context manager.

    one_plus: norm weights on disk are w of (1 + w).
    """

    def __init__(
        self, checkpoint: Checkpoint, options: ModelOptions, config: DecoderConfig, *, one_plus: bool = False
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = DTYPES[options.dtype]
        self.options = options
        self.one_plus = one_plus
        self.loader = WeightLoader(options.source or open_source(checkpoint), options.progress)
        self.loader.expect_experts(config.num_hidden_layers, config.experts)
        self.executor = HostExecutor(ExpertPool())
        self._banks = BankLoader(self.loader)
        self._layers: list[DecoderLayer] = []
        self._uploader = _uploader(options.device, self.dtype)

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._banks.close()
        self.loader.__exit__(kind, error, at)

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.norm_weight(name, self.config.hidden_size), self.config.rms_norm_eps, self.dtype)

    def norm_weight(self, name: str, size: int) -> torch.Tensor:
        weight = self.loader.take(f"{name}.weight", size)
        return weight.add_(1.0) if self.one_plus else weight

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        return Linear((self.loader.take_packed(f"{name}.weight", rows, columns),))

    def stacked(self, parts: Sequence[tuple[str, int]], columns: int) -> Linear:
        """parts: name and rows of matrices that lie one below the other."""
        return Linear(self.loader.take_rows([(f"{name}.weight", rows) for name, rows in parts], columns))

    def swiglu(self, name: str, intermediate: int) -> SwiGlu:
        return SwiGlu(load_one(self.loader, name, self.config.hidden_size, intermediate))

    def moe(
        self, layer: int, intermediate: int, *, normalize: bool = True, shared_intermediate: int | None = None
    ) -> MoeLayer:
        config, prefix = self.config, f"layers.{layer}.mlp"
        rows, shared = [(f"{prefix}.gate", config.experts)], None
        if shared_intermediate is not None:
            rows.append((f"{prefix}.shared_expert_gate", 1))
        router = Router(
            layer, self.stacked(rows, config.hidden_size), config.experts, config.num_experts_per_tok, normalize
        )
        shape = ExpertShape(config.experts, config.hidden_size, intermediate)
        self.executor.pool.add(layer, self._banks.load(layer, shape))
        if shared_intermediate is not None:
            shared = self.swiglu(f"{prefix}.shared_expert", shared_intermediate)
        return MoeLayer(router, self.executor, shared)

    def attention(self, layer: int, *, head_norms: bool, gated: bool = False) -> Attention:
        """gated: q_proj's rows are, head by head, D of the query and D of its output gate."""
        config, prefix = self.config, f"layers.{layer}.self_attn"
        heads, kv_heads, size = config.num_attention_heads, config.kv_heads, config.head_size
        rows = [
            ("q_proj", heads * size * (2 if gated else 1)),
            ("k_proj", kv_heads * size),
            ("v_proj", kv_heads * size),
        ]
        bias = self._biases(prefix, rows, gated) if config.attention_bias else None
        out_bias = self.loader.take(f"{prefix}.o_proj.bias", config.hidden_size) if config.attention_bias else None
        out = self.loader.take_packed(f"{prefix}.o_proj.weight", config.hidden_size, heads * size)
        return Attention(
            qkv=Linear(self._query_key_value(prefix, rows, gated), bias),
            out=Linear((out,), out_bias),
            norm=self._head_norm(prefix) if head_norms else None,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            gated=gated,
        )

    def _query_key_value(self, prefix: str, rows: list[tuple[str, int]], gated: bool) -> tuple[PackedMatrix, ...]:
        """Queries, keys, values and, last, the gates that q_proj has between its heads."""
        hidden = self.config.hidden_size
        if not gated:
            return self.loader.take_rows([(f"{prefix}.{name}.weight", count) for name, count in rows], hidden)
        query, key, value = (self.loader.take_matrix(f"{prefix}.{name}.weight", count, hidden) for name, count in rows)
        query, half = halves_apart(query, self.config.head_size), query.rows // 2
        return stack([part(query, 0, half), key, value, part(query, half, query.rows)])

    def _biases(self, prefix: str, rows: list[tuple[str, int]], gated: bool) -> torch.Tensor:
        query, key, value = (self.loader.take(f"{prefix}.{name}.bias", count) for name, count in rows)
        if not gated:
            return torch.cat((query, key, value))
        heads = query.view(-1, 2, self.config.head_size)
        return torch.cat((heads[:, 0].flatten(), key, value, heads[:, 1].flatten()))

    def _head_norm(self, prefix: str) -> RmsNorm:
        config = self.config
        query = self.norm_weight(f"{prefix}.q_norm", config.head_size)
        key = self.norm_weight(f"{prefix}.k_norm", config.head_size)
        weight = torch.cat((query.expand(config.num_attention_heads, -1), key.expand(config.kv_heads, -1)))
        return RmsNorm(weight, config.rms_norm_eps, torch.float32)

    def add(self, layer: DecoderLayer) -> None:
        """The next layer. For a device everything but the routed experts is copied there and given up here."""
        if self._uploader is None:
            self._layers.append(layer)
        else:
            self._uploader.add(layer)

    def decoder(
        self,
        rope: RopeScaling,
        *,
        states: tuple[tuple[StateSpec, ...], ...] = (),
        window: int | None = None,
    ) -> Model:
        """Reads what lies around the layers; raises CheckpointError if a tensor is left over."""
        config, checkpoint = self.config, self.checkpoint
        embedding = self.loader.take_packed("embed_tokens.weight", config.vocab_size, config.hidden_size)
        norm = self.norm("norm")
        tied = tied_embeddings(checkpoint) and "lm_head.weight" not in self.loader
        head = Linear((embedding,)) if tied else self.linear("lm_head", config.vocab_size, config.hidden_size)
        self._banks.finish()
        self.loader.finish()
        decoder = Decoder(
            vocab_size=config.vocab_size,
            max_context=checkpoint.max_context,
            eos_token_ids=checkpoint.eos_token_ids,
            cache_layout=CacheLayout(
                kv_layers=config.num_hidden_layers - len(states),
                kv_heads=config.kv_heads,
                head_dim=config.head_size,
                dtype=str(self.dtype).removeprefix("torch."),
                states=states,
            ),
            embedding=Embedding(embedding),
            layers=self._layers,
            norm=norm,
            head=head,
            rotary=Rotary(rope),
            window=window,
        )
        if self._uploader is not None:
            return self._uploader.decoder(decoder, self.executor.pool, self.options)
        decoder.native = native_decoder(decoder, self.options.threads)
        return decoder


def _uploader(device: str, dtype: torch.dtype) -> Uploader | None:
    """None for the CPU. Triton, which not every machine has, is imported for a device only."""
    if device == "cpu":
        return None
    from ftengine.models.gpu.upload import Uploader

    return Uploader(device, dtype)
