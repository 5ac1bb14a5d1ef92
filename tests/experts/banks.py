"""Small banks of random experts."""

from __future__ import annotations

import torch

from ftengine.experts.pool import ExpertBank
from ftengine.formats.format import FORMATS, ExpertLayout
from ftengine.formats.pack import pack_expert
from ftengine.formats.quantize import quantize

EXPERTS = 6


def bank(kind: str, hidden: int = 64, intermediate: int = 48, seed: int = 0, experts: int = EXPERTS) -> ExpertBank:
    generator = torch.Generator().manual_seed(seed)
    layout = ExpertLayout(hidden, intermediate, FORMATS[kind], FORMATS[kind])
    made = ExpertBank.allocate(layout, experts)
    for expert in range(experts):
        shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        parts = [quantize(torch.randn(s, generator=generator) * s[1] ** -0.5, FORMATS[kind]) for s in shapes]
        made.blocks[expert] = pack_expert(layout, *parts)
    return made
