"""Loads one layer's experts into a bank from either form that checkpoints have them in.

Per expert: `<prefix>.<e>.<gate|up|down>.weight`, matrices [I, H], [I, H], [H, I]. Fused: `<prefix>.gate_up_proj`
and `<prefix>.down_proj`, as [E, 2I, H] and [E, H, I] (transformers 5) or transposed, [E, H, 2I] and [E, I, H]
(transformers 4); which of the two it is follows from both shapes together, also where 2I = H or I = H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftengine.experts.pool import ExpertBank
from ftengine.weights.loader import TensorLoader


@dataclass(frozen=True)
class ExpertShape:
    experts: int  # E
    hidden: int  # H
    intermediate: int  # I


@dataclass(frozen=True)
class ProjectionNames:
    """What a checkpoint calls an expert's three matrices."""

    gate: str
    up: str
    down: str


def load_bank(loader: TensorLoader, prefix: str, shape: ExpertShape, names: ProjectionNames) -> ExpertBank:
    """Raises CheckpointError that names the tensor which is missing or has another shape."""
    if f"{prefix}.gate_up_proj" in loader:
        return _load_fused(loader, prefix, shape)
    return _load_per_expert(loader, prefix, shape, names)


def _new_bank(loader: TensorLoader, shape: ExpertShape) -> ExpertBank:
    return ExpertBank(
        torch.empty(shape.experts, 2 * shape.intermediate, shape.hidden, dtype=loader.dtype),
        torch.empty(shape.experts, shape.hidden, shape.intermediate, dtype=loader.dtype),
    )


def _load_per_expert(loader: TensorLoader, prefix: str, shape: ExpertShape, names: ProjectionNames) -> ExpertBank:
    into, back = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    # Every shape is checked before memory is taken for what the configuration claims.
    for expert in range(shape.experts):
        for projection, expected in ((names.gate, into), (names.up, into), (names.down, back)):
            loader.check(f"{prefix}.{expert}.{projection}.weight", expected)
    bank = _new_bank(loader, shape)
    for expert in range(shape.experts):
        gate, up = torch.split(bank.gate_up[expert], shape.intermediate)
        loader.read(f"{prefix}.{expert}.{names.gate}.weight", gate)
        loader.read(f"{prefix}.{expert}.{names.up}.weight", up)
        loader.read(f"{prefix}.{expert}.{names.down}.weight", bank.down[expert])
    return bank


def _load_fused(loader: TensorLoader, prefix: str, shape: ExpertShape) -> ExpertBank:
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    experts, hidden, intermediate = shape.experts, shape.hidden, shape.intermediate
    found = (loader.shape(gate_up), loader.shape(down))
    transposed = found == ((experts, hidden, 2 * intermediate), (experts, intermediate, hidden))
    if not transposed:
        loader.check(gate_up, (experts, 2 * intermediate, hidden))
        loader.check(down, (experts, hidden, intermediate))
    else:
        loader.check(gate_up, found[0])
        loader.check(down, found[1])
    bank = _new_bank(loader, shape)
    for name, matrices in ((gate_up, bank.gate_up), (down, bank.down)):
        if transposed:
            _read_transposed(loader, name, matrices)
        else:
            loader.read(name, matrices)
    return bank


def _read_transposed(loader: TensorLoader, name: str, out: torch.Tensor) -> None:
    experts, rows, columns = out.shape
    staging = torch.empty(columns, rows, dtype=out.dtype)
    for expert in range(experts):
        loader.read_part(name, staging, expert * rows * columns)
        out[expert].copy_(staging.T)
    loader.taken(name)
