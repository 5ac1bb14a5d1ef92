"""What a conversion will write: every section with its format and place, from a source's tensor facts. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ftengine.errors import CheckpointError
from ftengine.formats.format import BF16, F32, FP8, FP8_BLOCK, MXFP4, NVFP4, ExpertLayout, Format
from ftengine.weights.ftw.layout import DataFile, ExpertSection, Header, TensorSection
from ftengine.weights.ftw.placement import NO_HASH, place
from ftengine.weights.source import TensorFacts, WeightSource

KEEP = "keep"
EXPERT_FORMATS = (KEEP, "bf16", "fp8", "nvfp4", "mxfp4")
DENSE_FORMATS = (KEEP, "bf16", "fp8", "nvfp4")
TARGETS: Mapping[str, Format] = {"bf16": BF16, "fp8": FP8, "nvfp4": NVFP4, "mxfp4": MXFP4}
# What counts as being in the wanted format already.
SAME = {FP8: (FP8, FP8_BLOCK)}

EXPERT = re.compile(r"layers\.(\d{1,5})\.mlp\.experts\.(\d{1,5})\.(gate|up|down)_proj\.(weight|bias)")
LAYER = re.compile(r"layers\.(\d{1,5})\.")
# Read row by row, in float32: who gets which token must not depend on a rounding.
ROW_BY_ROW = (".mlp.gate.weight", ".mlp.router.weight", ".shared_expert_gate.weight")
# Tiny matrices that decide how fast a recurrent state forgets.
NEVER_QUANTIZED = (".linear_attn.in_proj_a.weight", ".linear_attn.in_proj_b.weight")
GATE_UP = ("gate.weight", "up.weight")


@dataclass(frozen=True)
class Options:
    """experts: one of EXPERT_FORMATS; dense: one of DENSE_FORMATS. shard_gib: a data file's limit."""

    experts: str = KEEP
    dense: str = KEEP
    shard_gib: float | None = None
    verify: bool = False


@dataclass(frozen=True)
class Plan:
    """Sections are placed and lack their hashes only."""

    files: tuple[DataFile, ...]
    tensors: tuple[TensorSection, ...]
    experts: tuple[ExpertSection, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def make_plan(source: WeightSource, options: Options) -> Plan:
    """Raises CheckpointError for tensors that cannot be one model's."""
    facts = source.tensors()
    found: dict[int, dict[int, dict[str, TensorFacts]]] = {}
    dense = []
    for name in sorted(facts, key=_order):
        match = EXPERT.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})[f"{match[3]}.{match[4]}"] = facts[name]
        else:
            dense.append(_tensor(name, facts[name], options.dense))
    experts = [_experts(layer, found[layer], options.experts) for layer in sorted(found)]
    experts += _packed_experts(source, options.experts)
    limit = None if options.shard_gib is None else int(options.shard_gib * (1 << 30))
    return Plan(*place(dense, experts, limit))


def _order(name: str) -> tuple[int, int, str]:
    match = LAYER.match(name)
    if match:
        return 1, int(match[1]), name
    return 0 if name.startswith("embed") else 2, 0, name


def wanted(stored: Format, choice: str) -> Format:
    """The format that `choice` makes of one."""
    if choice == KEEP:
        return stored
    target = TARGETS[choice]
    return stored if stored in SAME.get(target, (target,)) else target


def _tensor(name: str, facts: TensorFacts, choice: str) -> TensorSection:
    packed = len(facts.shape) == 2 and not name.endswith(ROW_BY_ROW)
    if packed:
        form = facts.format if name.endswith(NEVER_QUANTIZED) else wanted(facts.format, choice)
    else:
        form = facts.format if facts.format.name in ("f32", "f16", "bf16") else F32
    return TensorSection(name, facts.shape, form.number, packed, 0, 0, NO_HASH)


def _experts(layer: int, found: Mapping[int, Mapping[str, TensorFacts]], choice: str) -> ExpertSection:
    prefix = f"layers.{layer}.mlp.experts"
    for expert in range(max(found) + 1):
        for key in ("gate.weight", "up.weight", "down.weight"):
            if key not in found.get(expert, {}):
                projection, _, leaf = key.partition(".")
                raise CheckpointError(f"the tensor {prefix}.{expert}.{projection}_proj.{leaf} is missing")
    first = found[0]
    shape = first["gate.weight"].shape
    if len(shape) != 2:
        raise CheckpointError(f"the tensor {prefix}.0.gate_proj.weight has shape {list(shape)}, which is no matrix")
    rows, columns = shape
    shapes = {"gate.weight": (rows, columns), "up.weight": (rows, columns), "down.weight": (columns, rows)}
    biases = {"gate.bias": (rows,), "up.bias": (rows,), "down.bias": (columns,)} if "gate.bias" in first else {}
    for expert, parts in found.items():
        if {key: facts.shape for key, facts in parts.items()} != {**shapes, **biases}:
            raise CheckpointError(f"the tensors of {prefix}.{expert} have other shapes than those of expert 0")
    gate_up = _common(facts.format for parts in found.values() for key, facts in parts.items() if key in GATE_UP)
    down = _common(parts["down.weight"].format for parts in found.values())
    layout = ExpertLayout(columns, rows, wanted(gate_up, choice), wanted(down, choice), bool(biases))
    return _section(layer, layout, len(found))


def _common(formats: Iterable[Format]) -> Format:
    """One layer's blocks have one form. Where a checkpoint mixes formats in a layer they become BF16."""
    found = set(formats)
    return found.pop() if len(found) == 1 else BF16


def _packed_experts(source: WeightSource, choice: str) -> list[ExpertSection]:
    """Those of an FTW source, which has no tensors of them."""
    header = getattr(source, "header", None)
    sections = []
    for section in header.experts if isinstance(header, Header) else ():
        old = section.layout
        gate_up, down = wanted(old.gate_up, choice), wanted(old.down, choice)
        layout = ExpertLayout(old.hidden, old.intermediate, gate_up, down, old.bias)
        sections.append(_section(section.layer, layout, section.experts))
    return sections


def _section(layer: int, layout: ExpertLayout, experts: int) -> ExpertSection:
    return ExpertSection(
        layer=layer,
        hidden=layout.hidden,
        intermediate=layout.intermediate,
        gate_up=layout.gate_up.number,
        down=layout.down.number,
        bias=layout.bias,
        file=0,
        offset=0,
        sha256=(NO_HASH,) * experts,
    )
