"""What a checkpoint will take in memory, told from its headers and config.json before anything is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftengine.formats.format import BF16, ExpertLayout, Format, ScaleKind
from ftengine.memory.plan import ITEM_BYTES
from ftengine.weights.source import Described, TensorFacts

# Bytes: cuBLAS's workspaces, a matrix being dequantized, results of routes; at warm-up, tuning; and what torch does not
# count, the code of kernels and graphs: 0.3 GiB (an H200 with 8 GiB left went 0.08 GiB over a plan without them).
LIBRARIES = 384 << 20
CHUNK = 64  # tokens of a chunk of the Gated DeltaNet rule
DECODE_ROWS = 16  # of the largest decode step

EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
ROUTER = re.compile(r"layers\.(\d+)\.mlp\.gate\.weight")


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of weights as they will lie in memory."""

    dense: int  # everything but routed experts
    block: int = 0  # of the largest routed expert
    experts: int = 0  # of a layer, a number
    layers: int = 0  # with routed experts, a number
    banks: int = 0  # of all routed experts together
    next_routers: int = 0  # of what prefetching asks, besides `dense`: the routers of all MoE layers but the first

    @property
    def total(self) -> int:
        """Routed experts, a number."""
        return self.experts * self.layers


def weight_sizes(source: Described, text_config: Mapping[str, Any]) -> WeightSizes:
    """Matrices packed, each in its own format, the rest as float32."""
    layouts = expert_layouts(source, text_config)
    experts = _number(text_config, "num_experts") or _number(text_config, "num_local_experts")
    return WeightSizes(
        dense=sum(_bytes(facts) for name, facts in source.tensors().items() if not _expert(name, facts)),
        block=max((layout.block_bytes for layout in layouts), default=0),
        experts=experts if layouts else 0,
        layers=len(layouts),
        banks=sum(experts * layout.block_bytes for layout in layouts),
        next_routers=_next_routers(source) if layouts else 0,
    )


def expert_layouts(source: Described, text_config: Mapping[str, Any]) -> list[ExpertLayout]:
    """One for each layer with routed experts, as they will lie in memory."""
    routed: dict[int, dict[str, list[TensorFacts]]] = {}
    for name, facts in source.tensors().items():
        if found := _expert(name, facts):
            routed.setdefault(int(found[1]), {}).setdefault(found[2], []).append(facts)
    layouts = filter(None, map(source.expert_layout, range(_number(text_config, "num_hidden_layers"))))
    return [*layouts, *filter(None, map(_layout, routed.values()))]


def weight_bytes(source: Described, text_config: Mapping[str, Any]) -> int:
    """Of all weights."""
    sizes = weight_sizes(source, text_config)
    return sizes.dense + sizes.banks


def kv_bytes_per_token(text_config: Mapping[str, Any], dtype: str) -> int:
    """Keys and values of one token by the names that Hugging Face configurations share; 0 if they are not there.

    A lower bound to refuse with early: once the model is loaded its CacheLayout says it exactly.
    """

    def number(name: str, otherwise: int = 0) -> int:
        return _number(text_config, name, otherwise)

    layers, heads, hidden = number("num_hidden_layers"), number("num_attention_heads"), number("hidden_size")
    head_dim = number("head_dim", hidden // heads if heads else 0)
    kinds = text_config.get("layer_types")
    if isinstance(kinds, list):
        layers = sum(kind != "linear_attention" for kind in kinds)
    else:
        layers //= number("full_attention_interval", 1)
    return 2 * layers * number("num_key_value_heads", heads) * head_dim * ITEM_BYTES[dtype]


def state_bytes(text_config: Mapping[str, Any]) -> int:
    """One sequence's recurrent state over all Gated DeltaNet layers, by the names of their configurations; float32."""

    def number(name: str, otherwise: int = 0) -> int:
        return _number(text_config, name, otherwise)

    kinds, layers = text_config.get("layer_types"), number("num_hidden_layers")
    recurrent = layers - layers // number("full_attention_interval", 4)
    if isinstance(kinds, list):
        recurrent = kinds.count("linear_attention")
    keys, values, _ = _linear_sizes(text_config)
    window = (number("linear_conv_kernel_dim", 4) - 1) * (2 * keys + values)
    return 4 * recurrent * (window + number("linear_key_head_dim") * values)


def experts_per_token(text_config: Mapping[str, Any]) -> int:
    return _number(text_config, "num_experts_per_tok")


def decode_workspace(text_config: Mapping[str, Any]) -> int:
    """GPU memory of decode steps, and what libraries and kernels keep however much is computed."""
    return LIBRARIES + DECODE_ROWS * 4 * (2 * _number(text_config, "vocab_size") + 8 * _widest(text_config))


def prefill_bytes_per_token(text_config: Mapping[str, Any], dtype: str) -> int:
    """GPU memory that a prefill step takes for each token at its fullest: the residual stream and one layer's
    activations, as models/gpu/prefill.py and the kernels below it hold them. Products are float32, and each exists
    twice while it is put beside another one; the rest has the size of `dtype`.
    """

    def number(name: str) -> int:
        return _number(text_config, name)

    hidden, item = number("hidden_size"), ITEM_BYTES[dtype]
    keys, values, heads = _linear_sizes(text_config)
    delta_net = (2 * keys + values) * (4 + item)  # convolved, then queries, keys and values
    delta_net += values * 8 * item  # chunks: values and keys as the rule transforms them, its result, the gated result
    delta_net += (
        values * number("linear_key_head_dim") * item // CHUNK + heads * CHUNK * 8
    )  # states, decays between tokens
    attention = 2 * number("num_attention_heads") * _head_dim(text_config) * item
    mixer = 8 * _widest(text_config) + max(attention, delta_net)
    top_k, shared = experts_per_token(text_config), number("shared_expert_intermediate_size")
    intermediate = number("moe_intermediate_size") or number("intermediate_size")
    experts = number("num_experts") or number("num_local_experts")
    moe = 8 * (experts + 1 + 2 * shared) + top_k * (intermediate * item + 64) + hidden * item + shared * item
    return hidden * (4 + item) + hidden * 8 + max(mixer, moe)


def _head_dim(text_config: Mapping[str, Any]) -> int:
    heads = _number(text_config, "num_attention_heads")
    return _number(text_config, "head_dim", _number(text_config, "hidden_size") // heads if heads else 0)


def _linear_sizes(text_config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of Gated DeltaNet layers: columns of keys, columns of values, heads of values; zeros without such layers."""

    def number(name: str) -> int:
        return _number(text_config, name)

    heads = number("linear_num_value_heads")
    return (
        number("linear_num_key_heads") * number("linear_key_head_dim"),
        heads * number("linear_value_head_dim"),
        heads,
    )


def _widest(text_config: Mapping[str, Any]) -> int:
    """Columns of the widest product of a mixer."""
    heads = _number(text_config, "num_attention_heads")
    attention = (2 * heads + 2 * _number(text_config, "num_key_value_heads", heads)) * _head_dim(text_config)
    keys, values, linear_heads = _linear_sizes(text_config)
    return max(attention, 2 * (keys + values + linear_heads))


def _next_routers(source: Described) -> int:
    """Of those that models/gpu/next_routers.py makes: without scales, so that columns can be multiplied in place."""
    tensors = source.tensors()
    found = {int(match[1]): facts for name, facts in tensors.items() if (match := ROUTER.fullmatch(name))}
    following = [found[layer] for layer in sorted(found)[1:]]
    return sum(
        math.prod(each.shape) * each.format.bits // 8 for each in following if each.format.scales is ScaleKind.NONE
    )


def _expert(name: str, facts: TensorFacts) -> re.Match[str] | None:
    """Of a routed expert's matrix: its layer and projection."""
    return EXPERT.fullmatch(name) if len(facts.shape) == 2 else None


def _bytes(facts: TensorFacts) -> int:
    return facts.format.matrix_bytes(*facts.shape) if len(facts.shape) == 2 else 4 * math.prod(facts.shape)


def _layout(projections: Mapping[str, list[TensorFacts]]) -> ExpertLayout | None:
    """As experts/load.py packs a layer's experts; None where a projection is missing, which loading then refuses."""
    gate, up, down = (projections.get(name, []) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (gate and up and down):
        return None
    intermediate, hidden = gate[0].shape
    return ExpertLayout(hidden, intermediate, _common([*gate, *up]), _common(down))


def _common(tensors: Iterable[TensorFacts]) -> Format:
    found = {facts.format for facts in tensors}
    return found.pop() if len(found) == 1 else BF16


def _number(text_config: Mapping[str, Any], name: str, otherwise: int = 0) -> int:
    value = text_config.get(name)
    return value if type(value) is int and value > 0 else otherwise
