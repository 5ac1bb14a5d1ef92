"""What a checkpoint says of how its weights are quantized, and what is in it, in a person's words. Torch-free.

Which format a tensor has follows from what lies on disk: its dtype and its scales (arrange.py). The configuration is
read for what the tensors cannot tell: methods whose numbers mean something else, and who made the checkpoint. Its lists
of excluded modules and of algorithms by layer repeat what the tensors show.

Sources: ModelOpt's unified Hugging Face export (hf_quant_config.json; the same as quantization_config with
quant_method "modelopt"), compressed-tensors' QuantizationConfig, transformers' FineGrainedFP8Config and Mxfp4Config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ftengine.errors import CheckpointError
from ftengine.weights.arrange import arrange
from ftengine.weights.checkpoint import MAX_CONFIG_BYTES, Checkpoint
from ftengine.weights.files import read_json_object
from ftengine.weights.source import TensorFacts

HF_QUANT_CONFIG = "hf_quant_config.json"
READ = "BF16, F16, F32, FP8, NVFP4 and MXFP4 are read, from safetensors, and GGUF"

MODELOPT_ALGORITHMS = {
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP4", "W4A8_MXFP4_FP8"),
    *("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MIXED_PRECISION", "UNQUANTIZED", "NONE"),
}
COMPRESSED_FORMATS = {
    *("float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    *("mixed-precision", "dense", "fakequant"),
}
MAKERS = {"modelopt": "ModelOpt", "compressed-tensors": "compressed-tensors"}
WORDS = {"fp8-block": "block FP8"}
SMALL_PART = 0.01  # of a class's bytes: formats below it are not worth a person's attention


class _Weights(msgspec.Struct):
    type: str = "float"
    symmetric: bool = True


class _Group(msgspec.Struct):
    weights: _Weights | None = None
    format: str | None = None


class _Layer(msgspec.Struct):
    quant_algo: str | None = None


class _Transform(msgspec.Struct):
    config_groups: dict[str, Any] | None = None


class _Sparsity(msgspec.Struct):
    format: str = "dense"


class _Method(msgspec.Struct):
    """Fields of all makers; `quant_method` says whose they are."""

    quant_method: str | None = None
    quant_algo: str | None = None  # ModelOpt's, as the next
    quantized_layers: dict[str, _Layer] = {}
    format: str | None = None  # compressed-tensors', as the next four
    config_groups: dict[str, _Group | list[str]] = {}
    transform_config: _Transform | None = None
    sparsity_config: _Sparsity | None = None
    weight_block_size: list[int] | None = None  # "fp8"
    fmt: str | None = None


@dataclass(frozen=True)
class Description:
    """Formats by the bytes they take, the largest first: of the routed experts, and of all other matrices."""

    experts: tuple[str, ...]
    dense: tuple[str, ...]
    maker: str = ""

    @property
    def text(self) -> str:
        """ "NVFP4 experts (ModelOpt), BF16 dense"; "BF16" where all have one format."""
        maker = f" ({self.maker})" if self.maker else ""
        if self.experts == self.dense or not self.experts:
            return _and(self.dense) + maker
        return f"{_and(self.experts)} experts{maker}, {_and(self.dense)} dense"


def describe(checkpoint: Checkpoint) -> Description:
    """What a folder of safetensors holds. Raises CheckpointError for what cannot be read, as loading would."""
    maker = check_method(checkpoint)
    facts = {name: stored.facts for name, stored in arrange(checkpoint).items()}
    return summary(facts, maker)


def summary(facts: Mapping[str, TensorFacts], maker: str = "") -> Description:
    """The same of any source's tensors by canonical name."""
    matrices = {name: fact for name, fact in facts.items() if len(fact.shape) == 2}
    experts = _formats(fact for name, fact in matrices.items() if ".mlp.experts." in name)
    dense = _formats(fact for name, fact in matrices.items() if ".mlp.experts." not in name)
    return Description(experts, dense, maker)


def check_method(checkpoint: Checkpoint) -> str:
    """Who quantized the checkpoint, or "" if nobody did. Raises CheckpointError if its numbers cannot be read."""
    method = _method(checkpoint)
    if method is None:
        return ""
    refused = _refused(method)
    if refused:
        raise CheckpointError(
            f"{checkpoint.path} is quantized with {refused[:80]}, which is not read: {READ}", "ft pull"
        )
    return MAKERS.get(method.quant_method or "", "")


def _method(checkpoint: Checkpoint) -> _Method | None:
    where = checkpoint.path / "config.json"
    found = checkpoint.config.get("quantization_config") or checkpoint.text_config.get("quantization_config")
    if not found:
        where = checkpoint.path / HF_QUANT_CONFIG
        exported = read_json_object(checkpoint.path, HF_QUANT_CONFIG, MAX_CONFIG_BYTES)
        found = exported.get("quantization") if exported else None
        if not found:
            return None
    try:
        method = msgspec.convert(found, _Method)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"what {where} says of quantization: {error}") from None
    if where.name == HF_QUANT_CONFIG:
        method.quant_method = "modelopt"
    return method


def _refused(method: _Method) -> str:
    """What of it is not read, or ""."""
    if method.quant_method == "modelopt":
        algorithms = [method.quant_algo, *(layer.quant_algo for layer in method.quantized_layers.values())]
        unread = [name for name in algorithms if name and name.upper() not in MODELOPT_ALGORITHMS]
        return f"ModelOpt's {unread[0]}" if unread else ""
    if method.quant_method == "compressed-tensors":
        unread = _unread_parts(method)
        return f"compressed-tensors' {unread[0]}" if unread else ""
    if method.quant_method == "fp8":
        if method.weight_block_size not in (None, [128, 128]):
            return f"FP8 in blocks of {method.weight_block_size}"
        return f"FP8 as {method.fmt}" if method.fmt not in (None, "e4m3") else ""
    if method.quant_method is None:
        return "a method that it does not name"
    return "" if method.quant_method == "mxfp4" else f"the method {method.quant_method!r}"


def _unread_parts(method: _Method) -> list[str]:
    groups = [group for group in method.config_groups.values() if isinstance(group, _Group)]
    forms = [method.format, *(group.format for group in groups)]
    unread = [form for form in forms if form and form not in COMPRESSED_FORMATS]
    weights = [group.weights for group in groups if group.weights is not None]
    unread += [f"{weight.type} weights" for weight in weights if weight.type != "float"]
    unread += ["asymmetric weights" for weight in weights if not weight.symmetric]
    if method.transform_config is not None and method.transform_config.config_groups:
        unread.append("rotations")
    if method.sparsity_config is not None and method.sparsity_config.format != "dense":
        unread.append(method.sparsity_config.format)
    return unread


def _formats(facts: Iterable[TensorFacts]) -> tuple[str, ...]:
    sizes: Counter[str] = Counter()
    for fact in facts:
        sizes[WORDS.get(fact.format.name, fact.format.name.upper())] += fact.nbytes
    total = sizes.total()
    return tuple(word for word, size in sizes.most_common() if size >= SMALL_PART * total)


def _and(words: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "nothing"
