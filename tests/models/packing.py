"""Packed forms of plain tensors, for layers built by hand."""

from __future__ import annotations

import torch

from ftengine.experts.pool import ExpertBank
from ftengine.formats.format import BF16, F32, ExpertLayout, Format
from ftengine.formats.matrix import PackedMatrix, QuantMatrix
from ftengine.formats.pack import pack, pack_expert
from ftengine.layers.linear import Linear, SwiGlu

FORMATS: dict[torch.dtype, Format] = {torch.float32: F32, torch.bfloat16: BF16}


def natural(weight: torch.Tensor) -> QuantMatrix:
    return QuantMatrix(FORMATS[weight.dtype], *weight.shape, weight)


def packed(weight: torch.Tensor) -> PackedMatrix:
    return pack(natural(weight))


def linear(*weights: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return Linear(tuple(packed(weight) for weight in weights), bias)


def bank(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> ExpertBank:
    """gate, up [E, I, H]; down [E, H, I], all of one dtype."""
    experts, intermediate, hidden = gate.shape
    made = ExpertBank.allocate(ExpertLayout(hidden, intermediate, FORMATS[gate.dtype], FORMATS[down.dtype]), experts)
    for block, matrices in zip(made.blocks, zip(gate, up, down, strict=True), strict=True):
        pack_expert(made.layout, *(natural(matrix) for matrix in matrices), out=block)
    return made


def swiglu(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> SwiGlu:
    return SwiGlu(bank(gate[None], up[None], down[None]))
