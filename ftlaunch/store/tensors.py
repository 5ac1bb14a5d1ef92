"""What a model's tensors are, from headers only: their part of the model, parameters, bytes and number format.

Torch-free. Parameters are counted as they act: two to a byte in 4-bit formats, and none in scales.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.header import TensorEntry
from ftengine.weights.names import canonical

EXPERTS, VISION, FURTHER = "experts", "vision", "further tokens"
NOT_LOADED = (VISION, FURTHER)
# The first that is in the canonical name; the order of rows in `ft show`.
PARTS = (
    (".experts.", EXPERTS),
    (".shared_expert", "shared expert"),
    (".mlp.gate.", "router"),
    (".mlp.router.", "router"),
    (".self_attn.", "attention"),
    (".linear_attn.", "linear attention"),
    (".mlp.", "feed-forward"),
    ("embed_tokens.", "embedding"),
    ("lm_head.", "output head"),
    ("norm", "norms"),
)
ORDER = (*dict.fromkeys(part for _, part in PARTS), "other", *NOT_LOADED)

SCALE = re.compile(r"(_scale|_scale_inv|_scale_2|_global_scale|_scales|\.scale|input_scale|_zero_point|_shape|_g_idx)$")
NVFP4_SCALES = ("weight_scale_2", "weight_global_scale")
FORMATS = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F8_E4M3": "fp8", "I8": "int8"}


@dataclass(frozen=True)
class Tensor:
    """name: canonical where the model loads it, else as on disk. format: of the matrix; scales have their matrix's."""

    name: str
    part: str
    parameters: int
    bytes: int
    format: str


def tensors(checkpoint: Checkpoint) -> list[Tensor]:
    """Raises CheckpointError when a header is damaged or a file is missing."""
    from ftengine.weights.ftw.header import is_ftw

    if checkpoint.gguf is not None:
        return list(_gguf(checkpoint))
    if is_ftw(checkpoint.path):
        return list(_ftw(checkpoint))
    return list(_safetensors(checkpoint.tensors()))


def part_of(name: str) -> str:
    """Of a canonical name."""
    return next((part for key, part in PARTS if key in name), "other")


def _safetensors(entries: dict[str, TensorEntry]) -> Iterator[Tensor]:
    for disk_name, entry in entries.items():
        name = canonical(disk_name)
        part = _ignored_part(disk_name) if name is None else part_of(name)
        form = _format(disk_name, entry, entries)
        yield Tensor(name or disk_name, part, _parameters(disk_name, entry), entry.nbytes, form)


def _ignored_part(name: str) -> str:
    return FURTHER if "mtp." in name else VISION if "vis" in name else "other"


def _parameters(name: str, entry: TensorEntry) -> int:
    if SCALE.search(name):
        return 0
    return math.prod(entry.shape) * (2 if _is_four_bit(name, entry) else 1)


def _is_four_bit(name: str, entry: TensorEntry) -> bool:
    """Pairs of codes: ModelOpt and compressed-tensors have them as U8 weights, gpt-oss as U8 blocks."""
    return entry.dtype == "U8" and name.endswith(("weight", "weight_packed", "_blocks"))


def _format(name: str, entry: TensorEntry, entries: dict[str, TensorEntry]) -> str:
    scale = SCALE.search(name)
    if scale is not None:
        return _matrix_format(name[: scale.start()], entries) or "scales"
    if _is_four_bit(name, entry):
        return _packed_format(name, entries)
    return FORMATS.get(entry.dtype, entry.dtype.lower())


def _packed_format(name: str, entries: dict[str, TensorEntry]) -> str:
    module = name.rpartition(".")[0]
    return "nvfp4" if any(f"{module}.{scale}" in entries for scale in NVFP4_SCALES) else "mxfp4"


def _matrix_format(stem: str, entries: dict[str, TensorEntry]) -> str | None:
    for name in (stem, f"{stem}_packed", f"{stem}_blocks", f"{stem}.weight", f"{stem}weight"):
        if name in entries:
            return _format(name, entries[name], entries) if not SCALE.search(name) else None
    return None


def _gguf(checkpoint: Checkpoint) -> Iterator[Tensor]:
    from ftengine.weights.gguf_layout import canonical_name

    assert checkpoint.gguf is not None
    layers = checkpoint.text_config["num_hidden_layers"]
    for tensor in checkpoint.gguf.header.tensors.values():
        name = canonical_name(tensor.name, layers)
        part = FURTHER if name is None else part_of(name)
        scale = tensor.name.endswith((".scale", ".input_scale"))
        parameters = 0 if scale else math.prod(tensor.shape)
        yield Tensor(name or tensor.name, part, parameters, tensor.nbytes, tensor.type.name.lower())


def _ftw(checkpoint: Checkpoint) -> Iterator[Tensor]:
    from ftengine.formats.format import BY_NUMBER
    from ftengine.weights.ftw.header import read_header

    header = read_header(checkpoint.path)
    for tensor in header.tensors:
        parameters = math.prod(tensor.shape)
        yield Tensor(tensor.name, part_of(tensor.name), parameters, tensor.nbytes, tensor.number_format.name)
    for section in header.experts:
        one = 3 * section.hidden * section.intermediate
        bias = 2 * section.intermediate + section.hidden if section.bias else 0
        formats = dict.fromkeys((BY_NUMBER[section.gate_up].name, BY_NUMBER[section.down].name))
        yield Tensor(
            f"layers.{section.layer}.mlp.experts.",
            EXPERTS,
            section.experts * (one + bias),
            section.extent,
            "+".join(formats),
        )
