"""Which canonical tensor each part of a GGUF file is, and what llama.cpp's converter did to it. Torch-free.

Names: gguf's `constants.py`. Changes: llama.cpp, conversion/llama.py (rotary row order of `llama`), conversion/qwen.py
(norms of Qwen3.5 are stored as 1 + w, A_log as -exp(A_log), the convolution without its middle dimension, and the value
heads of Gated DeltaNet layers tiled over the key heads instead of grouped by them).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftengine.errors import CheckpointError
from ftengine.weights.gguf_header import GgufHeader, GgufTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    **{f"attn_{ggml}.{kind}": f"self_attn.{ours}_proj.{kind}" for ggml, ours in
       (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")) for kind in ("weight", "bias")},
}  # fmt: skip
LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")
STACKED = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.weight")  # [E, rows, columns]
ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d{1,5})\.weight")  # files from before experts were stacked
COMPUTED = ("attn_rot_embd.weight",)
PER_TENSOR_SCALES = (".scale", ".input_scale")


class Change(enum.Enum):
    """What was done to the values, to be undone."""

    NONE = "none"
    PLUS_ONE = "1 + w"
    NEGATIVE_EXP = "-exp(w)"


@dataclass(frozen=True)
class RotaryRows:
    """Within each head, rotary pairs are neighbours in the file, and half a head apart in Hugging Face's order."""

    heads: int

    def order(self, count: int) -> NDArray[np.int64]:
        import numpy as np

        order: NDArray[np.int64] = np.arange(count).reshape(self.heads, -1, 2).swapaxes(1, 2).ravel()
        return order


@dataclass(frozen=True)
class TiledHeads:
    """Value heads stand key head by key head for the first of each, then for the second; grouped by key head in
    Hugging Face's order. The first `kept` rows (queries and keys) are no value heads.
    """

    key_heads: int
    value_heads: int
    size: int
    kept: int = 0

    def order(self, count: int) -> NDArray[np.int64]:
        import numpy as np

        tiled = np.arange(self.kept, count).reshape(self.value_heads // self.key_heads, self.key_heads, self.size)
        return np.concatenate((np.arange(self.kept), tiled.swapaxes(0, 1).ravel()))


@dataclass(frozen=True)
class Part:
    """One canonical tensor: `rows` rows of the file's tensor, seen as a matrix, from row `first` on.

    row_order, column_order: how to bring what was read into Hugging Face's order. scale: a tensor with one float32 for
    the matrix (or for each expert: number `expert`), which multiplies it.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    first: int
    rows: int
    change: Change = Change.NONE
    row_order: RotaryRows | TiledHeads | None = None
    column_order: TiledHeads | None = None
    scale: GgufTensor | None = None
    expert: int = 0

    @property
    def columns(self) -> int:
        return self.tensor.shape[-1]

    @property
    def nbytes(self) -> int:
        """Of the stored rows."""
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.columns // self.tensor.type.elements * self.tensor.type.bytes


def parts(header: GgufHeader, config: dict[str, Any]) -> dict[str, Part]:
    """Every canonical tensor of the language model. `config`: see gguf_config. Raises CheckpointError."""
    found: dict[str, Part] = {}
    scales: dict[str, GgufTensor] = {}
    for tensor in header.tensors.values():
        if tensor.name.endswith(PER_TENSOR_SCALES):
            scales[tensor.name] = tensor
            continue
        for name, part in _parts_of(tensor, config):
            if name in found:
                raise CheckpointError(f"{header.path}: {name} is in both {found[name].tensor.name} and {tensor.name}")
            found[name] = part
    return {name: _undo(name, _scaled(part, scales), header, config) for name, part in found.items()}


def canonical_name(name: str, layers: int) -> str | None:
    """For telling what a tensor is: stacked experts as `layers.N.mlp.experts.X`; an unknown name as it is. None: beyond
    the model's layers.
    """
    match = LAYER.fullmatch(name)
    if match is None:
        return TOP.get(name, name)
    if int(match[1]) >= layers:
        return None
    rest = match[2]
    if STACKED.fullmatch(rest) or ONE_EXPERT.fullmatch(rest) or "_exps." in rest:
        return f"layers.{match[1]}.mlp.experts.{rest}"
    return f"layers.{match[1]}.{IN_LAYER.get(rest, rest)}"


def _parts_of(tensor: GgufTensor, config: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    if tensor.name in TOP:
        yield TOP[tensor.name], _whole(tensor)
        return
    match = LAYER.fullmatch(tensor.name)
    if match is None:
        raise CheckpointError(f"{tensor.file}: the tensor {tensor.name} has no place in this architecture")
    layer, rest = int(match[1]), match[2]
    if layer >= config["num_hidden_layers"] or rest in COMPUTED:  # layers that predict further tokens come after
        return
    prefix = f"layers.{layer}."
    if stacked := STACKED.fullmatch(rest):
        yield from _experts(tensor, prefix, stacked[1], config)
    elif single := ONE_EXPERT.fullmatch(rest):
        yield f"{prefix}mlp.experts.{int(single[2])}.{single[1]}_proj.weight", _whole(tensor)
    elif rest in IN_LAYER:
        yield prefix + IN_LAYER[rest], _whole(tensor)
    else:
        raise CheckpointError(f"{tensor.file}: the tensor {tensor.name} has no place in this architecture")


def _whole(tensor: GgufTensor) -> Part:
    rows = 1
    for extent in tensor.shape[:-1]:
        rows *= extent
    return Part(tensor, tensor.shape, 0, rows)


def _experts(tensor: GgufTensor, prefix: str, kind: str, config: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    if len(tensor.shape) != 3 or tensor.shape[0] != config.get("num_experts"):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}, which is not that of "
            f"{config.get('num_experts')} experts"
        )
    count, rows, columns = tensor.shape
    names = ("gate", "up") if kind == "gate_up" else (kind,)
    if rows % len(names):
        raise CheckpointError(f"{tensor.file}: {tensor.name} has an odd number of rows")
    each = rows // len(names)
    for expert in range(count):
        for index, name in enumerate(names):
            part = Part(tensor, (each, columns), expert * rows + index * each, each, expert=expert)
            yield f"{prefix}mlp.experts.{expert}.{name}_proj.weight", part


def _scaled(part: Part, scales: dict[str, GgufTensor]) -> Part:
    name = part.tensor.name.removesuffix("weight") + "scale"
    scale = scales.get(name)
    if scale is None or not part.tensor.name.endswith(".weight"):
        return part
    count = part.tensor.shape[0] if len(part.tensor.shape) == 3 else 1
    if scale.type.name != "F32" or scale.shape != (count,):
        raise CheckpointError(f"{scale.file}: {scale.name} is not a scale that fits its tensor")
    return replace(part, scale=scale)


def _undo(name: str, part: Part, header: GgufHeader, config: dict[str, Any]) -> Part:
    if name.endswith(".shared_expert_gate.weight"):
        return replace(part, shape=(1, part.columns), rows=1)
    architecture = header.metadata.get("general.architecture")
    if architecture == "llama" and ".self_attn." in name:
        return _undo_rotary(name, part, config)
    if architecture == "qwen35moe":
        return _undo_qwen35(name, part, config)
    return part


def _undo_rotary(name: str, part: Part, config: dict[str, Any]) -> Part:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return part
    rows = part.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise CheckpointError(f"{part.tensor.file}: {part.tensor.name} has {rows} rows for {heads} heads")
    return replace(part, row_order=RotaryRows(heads))


def _undo_qwen35(name: str, part: Part, config: dict[str, Any]) -> Part:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return replace(part, change=Change.PLUS_ONE)
    if ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return part
    if name.endswith(".conv1d.weight"):
        channels, kernel = part.shape if len(part.shape) == 2 else (0, 0)
        part = replace(part, shape=(channels, 1, kernel))
    elif name.endswith(".A_log"):
        part = replace(part, change=Change.NEGATIVE_EXP)
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys == values:
        return part
    if not 0 < keys < values or values % keys:
        raise CheckpointError(f"{part.tensor.file}: {values} value heads do not divide into {keys} groups")
    key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    own = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    size, kept = (1, 0) if own in ("in_proj_b", "in_proj_a", "dt_bias", "A_log") else (value_size, 0)
    if own in ("in_proj_qkv", "conv1d"):
        kept = 2 * keys * key_size
    order = TiledHeads(keys, values, size, kept)
    expected, extent = kept + values * size, part.columns if own == "out_proj" else part.shape[0]
    if extent != expected:
        raise CheckpointError(f"{part.tensor.file}: {part.tensor.name} has {extent} rows or columns, not {expected}")
    return replace(part, column_order=order) if own == "out_proj" else replace(part, row_order=order)
