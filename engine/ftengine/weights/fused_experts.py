"""The experts of a layer that lie together in one tensor, told apart. Torch-free. Forms: arrange.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ftengine.errors import CheckpointError
from ftengine.weights.header import TensorEntry
from ftengine.weights.scales import PLAIN, Scales, find_format
from ftengine.weights.stored import ALL, Module, Piece, Rows, Stored, codes_and_scales

MAX_EXPERTS = 1 << 16
# A layer's experts in one tensor: `…experts.gate_up_proj` and what belongs to it, as leaves of a module of that name.
FUSED = re.compile(r"(.*\.experts\.(?:gate_up_proj|down_proj))(?:_(.+))?$")
FUSED_LEAVES = {
    None: "weight",
    "blocks": "weight_blocks",
    "scales": "weight_scale",
    "scale": "weight_scale",
    "scale_inv": "weight_scale_inv",
    "bias": "bias",
    "input_scale": "input_scale",
    "activation_scale": "activation_scale",
}


def fused_experts(name: str, modules: Mapping[str, Module], interleaved: bool) -> list[Stored]:
    """The weights of `name`, a module that FUSED matches, by expert. interleaved: gate and up take turns row by row."""
    prefix, _, projection = name.rpartition(".")
    other = modules.get(f"{prefix}.{'down_proj' if projection == 'gate_up_proj' else 'gate_up_proj'}", {})
    module = modules[name]
    codes, scales = codes_and_scales(module)
    partner, _ = codes_and_scales(other)
    if codes is None or partner is None:
        missing = f"{prefix}.down_proj" if codes is not None else name
        raise CheckpointError(f"the tensor {missing} is missing from the checkpoint")
    rows, columns, transposed = _fused_shape(projection, codes, partner)
    if codes.dtype not in PLAIN and (transposed or (interleaved and codes.dtype != "U8")):
        raise CheckpointError(f"the tensor {codes.name} is {codes.dtype} in an order of rows that is not read")
    halves = _halves(projection, rows, interleaved)
    weights = []
    for expert in range(codes.shape[0]):
        for half, part in halves.items():
            piece = Piece(codes, expert, transposed, part)
            stored = _fused_half(codes, scales, (rows // len(halves), columns), len(halves), piece)
            weights.append(replace(stored, name=f"{prefix}.{expert}.{half}.weight"))
            if "bias" in module:
                weights.append(_fused_bias(f"{prefix}.{expert}.{half}.bias", module["bias"], codes, rows, part, expert))
    return weights


def _fused_shape(projection: str, codes: TensorEntry, partner: TensorEntry) -> tuple[int, int, bool]:
    """Rows and columns of one expert's matrix, and whether it lies transposed: both shapes together tell."""
    ours, theirs = _matrix_shape(codes), _matrix_shape(partner)
    gate_up, down = (ours, theirs) if projection == "gate_up_proj" else (theirs, ours)
    if codes.shape[0] == partner.shape[0]:
        if gate_up == (2 * down[1], down[0]):
            return (*ours, False)
        if gate_up == (down[1], 2 * down[0]):
            return ours[1], ours[0], True
    shapes = f"{codes.name} {list(codes.shape)} and {partner.name} {list(partner.shape)}"
    raise CheckpointError(f"the tensors {shapes} are not one layer's experts")


def _matrix_shape(codes: TensorEntry) -> tuple[int, int]:
    shape = codes.shape
    if codes.dtype == "U8" and len(shape) == 4 and shape[3] == 16 and shape[0] <= MAX_EXPERTS:
        return shape[1], shape[2] * 32  # gpt-oss: [E, rows, groups, bytes of a group]
    if codes.dtype == "U8" or len(shape) != 3 or shape[0] > MAX_EXPERTS:
        raise CheckpointError(f"the tensor {codes.name} is {codes.dtype} {list(shape)}, which no layer's experts are")
    return shape[1], shape[2]


def _halves(projection: str, rows: int, interleaved: bool) -> dict[str, Rows]:
    if projection == "down_proj":
        return {"down_proj": ALL}
    if interleaved:
        return {"gate_proj": Rows(0, None, 2), "up_proj": Rows(1, None, 2)}
    return {"gate_proj": Rows(0, rows // 2), "up_proj": Rows(rows // 2, rows)}


def _fused_half(codes: TensorEntry, scales: Scales, shape: tuple[int, int], halves: int, piece: Piece) -> Stored:
    """piece: the codes of one expert's matrix of the given shape, one of `halves` in what lies together."""
    share = codes.shape[0] * halves
    first = scales.first
    if codes.dtype in PLAIN:
        if first is not None:
            raise CheckpointError(f"the tensor {codes.name} is {codes.dtype}, and {first.name} would scale it")
        return Stored("", shape, PLAIN[codes.dtype], piece, codes.nbytes // share)
    if first is None or scales.second is not None or first.shape[:1] != codes.shape[:1]:
        raise CheckpointError(f"the tensor {codes.name} has scales that are missing or of a form that is not read")
    grid, rows = first.shape[1:], ALL
    if grid and halves == 2 and grid[0] > 1:
        if grid[0] % 2:
            raise CheckpointError(f"the tensor {first.name} has shape {list(first.shape)}, not even for gate and up")
        grid = (grid[0] // 2, *grid[1:])
        start = grid[0] if piece.rows.first else 0
        rows = piece.rows if piece.rows.step > 1 else Rows(start, start + grid[0])
    stored_shape = (shape[0], shape[1] // 2) if codes.dtype == "U8" else shape
    kind, found = find_format(codes, stored_shape, Scales(replace(first, shape=grid), None, False))
    nbytes = (codes.nbytes + first.nbytes) // share
    return Stored("", found, kind, piece, nbytes, Piece(first, piece.index, False, rows))


def _fused_bias(name: str, bias: TensorEntry, codes: TensorEntry, rows: int, part: Rows, expert: int) -> Stored:
    if bias.shape != (codes.shape[0], rows) or bias.dtype not in PLAIN:
        raise CheckpointError(
            f"the tensor {bias.name} has shape {list(bias.shape)}, expected {[codes.shape[0], rows]} of a plain dtype"
        )
    length = len(range(rows)[part.slice])
    kind = PLAIN[bias.dtype]
    return Stored(name, (length,), kind, Piece(bias, expert, False, part), length * kind.bits // 8)
