"""A decoder's layers in plain torch, from the formulas: what a model that was timed is compared with.

Everything is float32, of one sequence, in torch's own operations, on the CPU or on a GPU: weights are unpacked, and of
the experts only those that are used. With `act`, activations are rounded where kernels of the GPU hand them on, so that
what the rounding alone costs can be told from mistakes.

Sources: Mixtral https://arxiv.org/abs/2401.04088, Qwen3 https://arxiv.org/abs/2505.09388 (norms of heads), Gated
DeltaNet https://arxiv.org/abs/2412.06464, rotary embedding https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ftengine.formats.dequantize import dequantize, dequantized_rows
from ftengine.formats.format import ExpertLayout
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.formats.pack import unpack, unpack_expert
from ftengine.layers.rotary import inverse_frequencies
from ftengine.models.config import DecoderConfig, read_config, tied_embeddings
from ftengine.models.rope import rope_scaling
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.source import WeightSource

L2_EPSILON = 1e-6
THETA = {"MixtralForCausalLM": 1e6}  # where config.json has none
ROTARY_PART = {"Qwen3_5": 0.25}  # likewise, by the beginning of the architecture's name


@dataclass
class Past:
    """What a mixer remembers of the tokens before: keys and values [L, K, D], or a window [W - 1, C] and a state
    [Nv, Dk, Dv]. None where the sequence begins."""

    first: torch.Tensor
    second: torch.Tensor


class Reference:
    """act, everywhere: the dtype that activations are rounded to, None for none. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint, source: WeightSource, device: str = "cpu") -> None:
        self.config = read_config(checkpoint, DecoderConfig)
        self.text = checkpoint.text_config
        self.source = source
        self.device = torch.device(device)
        self.names = frozenset(source.tensors())
        self.one_plus = checkpoint.architecture.startswith("Qwen3_5")
        # Qwen3 alone leaves it to its config.json, and says no where that is silent.
        self.normalize = bool(self.text.get("norm_topk_prob", checkpoint.architecture != "Qwen3MoeForCausalLM"))
        part = next((part for name, part in ROTARY_PART.items() if checkpoint.architecture.startswith(name)), 1.0)
        rope = rope_scaling(self.config, theta=THETA.get(checkpoint.architecture, 1e4), partial=part)
        self.frequencies, self.rotary_factor = inverse_frequencies(rope).to(device), rope.attention_factor
        self.head = "embed_tokens" if tied_embeddings(checkpoint) else "lm_head"

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """float32 [T, H]."""
        return self.matrix("embed_tokens.weight")[tokens]

    def logits(self, residual: torch.Tensor, act: torch.dtype | None) -> torch.Tensor:
        """residual [N, H] -> [N, V]."""
        return rounded(self.norm("norm", residual), act) @ self.matrix(f"{self.head}.weight").T

    def layer(self, index: int) -> ReferenceLayer:
        return ReferenceLayer(self, index)

    def matrix(self, name: str) -> torch.Tensor:
        found = self.source.matrix(name)
        if isinstance(found, PackedMatrix):
            found = unpack(replace(found, data=copied(found.data, self.device)))
        return numbers(found, self.device)

    def plain(self, name: str) -> torch.Tensor:
        return copied(self.source.plain(name, torch.float32), self.device)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.plain(f"{name}.weight")
        return rms_norm(x, weight + 1 if self.one_plus else weight, self.config.rms_norm_eps)


class ReferenceLayer:
    """`mix` and `feed` give what is added to the residual stream."""

    def __init__(self, model: Reference, index: int) -> None:
        self.model, self.prefix = model, f"layers.{index}"
        self.recurrent = f"{self.prefix}.linear_attn.out_proj.weight" in model.names
        self.sparse = f"{self.prefix}.mlp.gate.weight" in model.names
        self._matrices: dict[str, torch.Tensor] = {}
        self._experts = Experts(model, index)

    def mix(self, residual: torch.Tensor, past: Past | None, act: torch.dtype | None) -> tuple[torch.Tensor, Past]:
        """residual [T, H] of the tokens that follow `past`."""
        hidden = rounded(self.model.norm(f"{self.prefix}.input_layernorm", residual), act)
        return self._delta_net(hidden, past, act) if self.recurrent else self._attention(hidden, past, act)

    def feed(self, residual: torch.Tensor, act: torch.dtype | None) -> torch.Tensor:
        hidden = rounded(self.model.norm(f"{self.prefix}.post_attention_layernorm", residual), act)
        if not self.sparse:
            return self._swiglu("mlp", hidden, act)
        probabilities = (hidden @ self._matrix("mlp.gate").T).softmax(-1)
        weights, chosen = probabilities.sort(stable=True, descending=True, dim=-1)
        weights, chosen = (part[:, : self.model.config.num_experts_per_tok] for part in (weights, chosen))
        if self.model.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = self._experts(hidden, chosen, weights, act)
        if f"{self.prefix}.mlp.shared_expert.down_proj.weight" in self.model.names:
            shared = self._swiglu("mlp.shared_expert", hidden, act)
            out += shared * (hidden @ self._matrix("mlp.shared_expert_gate").T).sigmoid()
        return out

    def _attention(self, hidden: torch.Tensor, past: Past | None, act: torch.dtype | None) -> tuple[torch.Tensor, Past]:
        config, tokens = self.model.config, len(hidden)
        heads, groups, size = config.num_attention_heads, config.kv_heads, config.head_size
        before = 0 if past is None else len(past.first)
        query = self._projected("q_proj", hidden).view(tokens, heads, -1)
        query, gate = query[..., :size], query[..., size:]  # head by head a query and, where there is one, its gate
        key, value = (self._projected(name, hidden).view(tokens, groups, size) for name in ("k_proj", "v_proj"))
        if f"{self.prefix}.self_attn.q_norm.weight" in self.model.names:
            query = self.model.norm(f"{self.prefix}.self_attn.q_norm", query)
            key = self.model.norm(f"{self.prefix}.self_attn.k_norm", key)
        positions = torch.arange(before, before + tokens, device=hidden.device)
        query, key = (rounded(self._turned(part, positions), act) for part in (query, key))
        value = rounded(value, act)
        if past is not None:
            key, value = torch.cat((past.first, key)), torch.cat((past.second, value))
        many_keys, many_values = (part.repeat_interleave(heads // groups, 1) for part in (key, value))
        scores = torch.einsum("tnd,lnd->ntl", query, many_keys) / math.sqrt(size)
        later = torch.arange(len(key), device=hidden.device) > positions[:, None]
        out = torch.einsum("ntl,lnd->tnd", scores.masked_fill(later, -math.inf).softmax(-1), many_values)
        out = rounded(out * gate.sigmoid() if gate.shape[-1] else out, act)
        return self._projected("o_proj", out.flatten(1)), Past(key, value)

    def _projected(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self._matrix(f"self_attn.{name}").T
        bias = f"{self.prefix}.self_attn.{name}.bias"
        return out + self.model.plain(bias) if bias in self.model.names else out

    def _turned(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """heads [T, N, D]: pairs (i, i + R/2) of the first R dimensions."""
        angles = positions[:, None, None] * self.model.frequencies
        cosine, sine = (part * self.model.rotary_factor for part in (angles.cos(), angles.sin()))
        half = len(self.model.frequencies)
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine, rest), dim=-1)

    def _delta_net(self, hidden: torch.Tensor, past: Past | None, act: torch.dtype | None) -> tuple[torch.Tensor, Past]:
        text, plain = self.model.text, self.model.plain
        key_heads, value_heads = (int(text[f"linear_num_{name}_heads"]) for name in ("key", "value"))
        key_dim, value_dim = (int(text[f"linear_{name}_head_dim"]) for name in ("key", "value"))
        widths = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
        at = f"{self.prefix}.linear_attn"
        taps = plain(f"{at}.conv1d.weight").squeeze(1).T  # [W, C], the oldest token's first
        scale = plain(f"{at}.A_log").exp()
        bias, norm = (plain(f"{at}.{name}") for name in ("dt_bias", "norm.weight"))
        mixed, gates, rates, decays = (
            hidden @ self._matrix(f"linear_attn.in_proj_{name}").T for name in ("qkv", "z", "b", "a")
        )
        window = mixed.new_zeros(len(taps) - 1, mixed.shape[1]) if past is None else past.first
        state = mixed.new_zeros(value_heads, key_dim, value_dim) if past is None else past.second
        rows = []
        for token in range(len(hidden)):
            seen = torch.cat((window, mixed[token : token + 1]))
            window = seen[1:]
            query, key, value = torch.split(F.silu((seen * taps).sum(0)), widths)
            query, key = (unit(part.view(key_heads, key_dim)) for part in (query, key))
            query, key = (part.repeat_interleave(value_heads // key_heads, 0) for part in (query, key))
            state = state * (-scale * F.softplus(decays[token] + bias)).exp()[:, None, None]
            recalled = torch.einsum("nk,nkv->nv", key, state)
            correction = rates[token].sigmoid()[:, None] * (value.view(value_heads, value_dim) - recalled)
            state = state + key[:, :, None] * correction[:, None]
            out = torch.einsum("nk,nkv->nv", query, state) / math.sqrt(key_dim)
            out = rms_norm(out, norm, self.model.config.rms_norm_eps)
            rows.append((out * F.silu(gates[token].view(value_heads, value_dim))).flatten())
        return rounded(torch.stack(rows), act) @ self._matrix("linear_attn.out_proj").T, Past(window, state)

    def _swiglu(self, name: str, hidden: torch.Tensor, act: torch.dtype | None) -> torch.Tensor:
        gate, up, down = (self._matrix(f"{name}.{part}_proj") for part in ("gate", "up", "down"))
        return swiglu(hidden, gate, up, down, act)

    def _matrix(self, name: str) -> torch.Tensor:
        if name not in self._matrices:
            self._matrices[name] = self.model.matrix(f"{self.prefix}.{name}.weight")
        return self._matrices[name]


class Experts:
    """One layer's routed experts; those that were used once stay unpacked."""

    def __init__(self, model: Reference, layer: int) -> None:
        self._model, self._layer = model, layer
        self._layout: ExpertLayout | None = model.source.expert_layout(layer)
        self._blocks: torch.Tensor | None = None
        self._ready: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, act: torch.dtype | None
    ) -> torch.Tensor:
        """hidden [T, H], chosen and weights [T, k] -> [T, H]."""
        if self._layout is not None and self._blocks is None:
            self._blocks = torch.empty(self._model.config.experts, self._layout.block_bytes, dtype=torch.uint8)
            self._model.source.read_experts(self._layer, self._blocks)
        new = sorted(set(chosen.flatten().tolist()) - set(self._ready))
        with ThreadPoolExecutor(max(1, torch.get_num_threads()) if hidden.device.type == "cpu" else 1) as threads:
            self._ready.update(zip(new, threads.map(self._unpacked, new), strict=True))
        out = torch.zeros_like(hidden)
        for expert in set(chosen.flatten().tolist()):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            found = swiglu(hidden[rows], *self._ready[expert], act)
            out.index_add_(0, rows, found * weights[rows, places, None])
        return out

    def _unpacked(self, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._layout is None:
            at = f"layers.{self._layer}.mlp.experts.{expert}"
            gate, up, down = (self._model.matrix(f"{at}.{part}_proj.weight") for part in ("gate", "up", "down"))
            return gate, up, down
        assert self._blocks is not None
        device = self._model.device
        matrices = unpack_expert(self._layout, copied(self._blocks[expert], device))[:3]
        gate, up, down = (numbers(matrix, device, threads=1) for matrix in matrices)
        return gate, up, down


def swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, act: torch.dtype | None
) -> torch.Tensor:
    return rounded(F.silu(x @ gate.T) * (x @ up.T), act) @ down.T


def numbers(matrix: QuantMatrix, device: torch.device, threads: int = 0) -> torch.Tensor:
    """float32 [rows, columns]."""
    if device.type == "cpu":
        return dequantize(matrix, threads=threads)
    codes, scales, row_scales = (
        None if part is None else copied(part, device) for part in (matrix.codes, matrix.scales, matrix.row_scales)
    )
    assert codes is not None
    moved = QuantMatrix(matrix.format, matrix.rows, matrix.columns, codes, scales, row_scales)
    return dequantized_rows(moved, 0, matrix.rows)


def copied(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device; a tensor that lies there stays.

    To a GPU from memory of its own: CUDA refuses a copy that reaches from pinned memory into other memory, and nobody
    here knows what a source's tensors are views of.
    """
    return host if host.device.type == device.type else host.contiguous().clone().to(device)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt()


def rounded(x: torch.Tensor, act: torch.dtype | None) -> torch.Tensor:
    return x if act is None else x.to(act).float()
