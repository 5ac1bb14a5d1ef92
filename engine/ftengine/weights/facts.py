"""What a model's weights are, from its headers alone. Torch-free: says the same as the sources that read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftengine.formats.format import ExpertLayout
from ftengine.weights.arrange import arrange
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.source import TensorFacts


@dataclass(frozen=True)
class WeightFacts:
    """Fulfils weights.source.Described. layouts: of FTW's layers with routed experts."""

    facts: dict[str, TensorFacts]
    layouts: dict[int, ExpertLayout] = field(default_factory=dict)

    def tensors(self) -> dict[str, TensorFacts]:
        return self.facts

    def expert_layout(self, layer: int) -> ExpertLayout | None:
        return self.layouts.get(layer)


def weight_facts(checkpoint: Checkpoint) -> WeightFacts:
    """Raises CheckpointError for headers that are unsound, and for what is quantized in a way that is not read."""
    from ftengine.weights.ftw.header import is_ftw

    if checkpoint.gguf is not None:
        return _gguf(checkpoint)
    if is_ftw(checkpoint.path):
        return _ftw(checkpoint)
    from ftengine.weights.quantization import check_method

    check_method(checkpoint)
    return WeightFacts({name: stored.facts for name, stored in arrange(checkpoint).items()})


def _gguf(checkpoint: Checkpoint) -> WeightFacts:
    from ftengine.weights.gguf_kept import format_of
    from ftengine.weights.gguf_layout import parts

    assert checkpoint.gguf is not None
    found = parts(checkpoint.gguf.header, checkpoint.gguf.config)
    return WeightFacts({name: TensorFacts(part.shape, format_of(part), part.nbytes) for name, part in found.items()})


def _ftw(checkpoint: Checkpoint) -> WeightFacts:
    from ftengine.weights.ftw.header import read_header

    header = read_header(checkpoint.path)
    return WeightFacts(
        {tensor.name: TensorFacts(tensor.shape, tensor.number_format, tensor.nbytes) for tensor in header.tensors},
        {section.layer: section.layout for section in header.experts},
    )
