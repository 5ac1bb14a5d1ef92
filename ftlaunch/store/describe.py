"""Everything that `ft show` tells of a model, each fact with where it came from. Reads headers only; torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftengine.errors import CheckpointError
from ftengine.weights.checkpoint import Checkpoint
from ftlaunch.store import manifest, used
from ftlaunch.store.find import Found
from ftlaunch.store.listing import forms
from ftlaunch.store.tensors import EXPERTS, NOT_LOADED, ORDER, Tensor, tensors

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
PLACES = {"store": "store", "cache": "Hugging Face cache", "path": "as given"}
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True)
class Fact:
    label: str
    value: Any  # a str, int or None (not known)
    source: str


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    parameters: int
    formats: tuple[str, ...]  # most bytes first
    loaded: bool  # False: on disk, but text is computed without it


@dataclass(frozen=True)
class Loss:
    """What the conversion to FTW lost in one part: relative errors of whole matrices."""

    part: str
    format: str
    matrices: int
    mean: float
    worst: float
    worst_matrix: str


@dataclass(frozen=True)
class Description:
    facts: list[Fact]
    parts: list[Part]
    losses: list[Loss] = field(default_factory=list)


def describe(found: Found) -> Description:
    """Raises CheckpointError when the model's own files cannot be read."""
    checkpoint = Checkpoint.open(found.path)
    form, kind = forms(checkpoint)
    config, headers = _sources(checkpoint, form)
    listed = tensors(checkpoint)
    parts = _parts(listed)
    facts = [
        Fact("name", found.name, "as given"),
        Fact("path", str(found.path), PLACES[found.where]),
        *_origin(found),
        Fact("format", form, headers),
        _weights(checkpoint, form, kind, config, headers),
        Fact("architecture", checkpoint.architecture, config),
        Fact("served", _served(checkpoint.architecture), "ftengine"),
        *_sizes(checkpoint, parts, config, headers),
        Fact("context", checkpoint.max_context, config),
        *_dialect(checkpoint),
        Fact("last used", used.when(found.name), "store"),
    ]
    return Description(facts, parts, _losses(checkpoint, form))


def _weights(checkpoint: Checkpoint, form: str, kind: str, config: str, headers: str) -> Fact:
    """Of safetensors as the loader reads them; what it cannot read is named as the configuration does."""
    from ftengine.weights import quantization

    if form != "safetensors":
        return Fact("weights", kind, headers)
    try:
        return Fact("weights", quantization.describe(checkpoint).text, f"{headers}, {config}")
    except CheckpointError:
        return Fact("weights", f"{kind} (not read)", config)


def _sources(checkpoint: Checkpoint, form: str) -> tuple[str, str]:
    """What to call the configuration and the headers."""
    if form == "gguf":
        return "GGUF metadata", "GGUF header"
    return "config.json", "ftw.json" if form == "ftw" else "safetensors headers"


def _served(architecture: str) -> str:
    from ftengine.models.base import ARCHITECTURES

    return "yes" if architecture in ARCHITECTURES else "no"


def _origin(found: Found) -> list[Fact]:
    if found.where == "cache":
        place = PLACES[found.where]
        return [Fact("source", f"hub {found.name.partition('@')[0]}", place), Fact("revision", found.path.name, place)]
    directory = found.path if found.path.is_dir() else found.path.parent
    written = manifest.read(directory)
    if written is None:
        return []
    source, name = written.source, manifest.NAME
    facts = [Fact("source", f"{source.kind} {source.repo}", name)]
    if source.revision:
        asked = f" (asked for: {source.requested})" if source.requested else ""
        facts.append(Fact("revision", source.revision + asked, name))
    return facts


def _sizes(checkpoint: Checkpoint, parts: list[Part], config: str, headers: str) -> list[Fact]:
    text = checkpoint.text_config
    experts, chosen = _number(text, EXPERT_COUNTS), _number(text, TOP_K)
    total = sum(part.parameters for part in parts if part.loaded)
    routed = sum(part.parameters for part in parts if part.name == EXPERTS)
    active = total - routed + (routed * chosen // experts if experts and chosen else routed)
    return [
        Fact("layers", _number(text, ("num_hidden_layers",)), config),
        Fact("experts a layer", experts or 0, config),
        Fact("experts a token", chosen if experts else 0, config),
        Fact("parameters", total, headers),
        Fact("active parameters", active, f"{headers}, {config}"),
        Fact("bytes", sum(part.bytes for part in parts), headers),
    ]


def _number(config: dict[str, Any], names: Iterable[str]) -> int | None:
    return next((config[name] for name in names if type(config.get(name)) is int), None)


def _dialect(checkpoint: Checkpoint) -> list[Fact]:
    from ftengine.dialect.opening import demo_template, parser_name, read_grammar

    source, where = checkpoint.chat_template, _template_source(checkpoint)
    grammar = read_grammar(source if source is not None else demo_template())
    shown = f"forms that the template shows ({where})"
    return [
        Fact("template", "the model's own" if source is not None else "plain ChatML", where),
        Fact("tool calls", parser_name(grammar), shown),
        Fact("reasoning", "<think> blocks" if grammar.reasoning else "none", shown),
    ]


def _template_source(checkpoint: Checkpoint) -> str:
    if checkpoint.chat_template is None:
        return "the model has none"
    if checkpoint.gguf is not None:
        return "GGUF metadata"
    beside = (Path(checkpoint.path) / "chat_template.jinja").is_file()
    return "chat_template.jinja" if beside else "tokenizer_config.json"


def _parts(listed: list[Tensor]) -> list[Part]:
    found = []
    for name in ORDER:
        own = [tensor for tensor in listed if tensor.part == name]
        sizes: dict[str, int] = {}
        for tensor in own:
            sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.bytes
        if own:
            formats = tuple(sorted(sizes, key=lambda kind: -sizes[kind]))
            counted = sum(tensor.parameters for tensor in own)
            found.append(Part(name, sum(sizes.values()), counted, formats, name not in NOT_LOADED))
    return found


def _losses(checkpoint: Checkpoint, form: str) -> list[Loss]:
    if form != "ftw":
        return []
    from ftengine.formats.format import BY_NUMBER
    from ftengine.weights.ftw.header import read_header

    found = []
    for item in read_header(checkpoint.path).quantization:
        kind = BY_NUMBER.get(item.format)
        if kind is None:
            raise CheckpointError(f"{checkpoint.path} names the unknown number format {item.format}")
        found.append(Loss(item.part, kind.name, item.matrices, item.mean, item.worst, item.worst_matrix))
    return found
