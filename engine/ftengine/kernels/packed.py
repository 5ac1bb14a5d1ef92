"""Products with packed matrices and blocks of experts: the native kernels where they are built, else plain torch.

`reference_*` are the plain versions, which dequantize what they use.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import PANEL_ROWS, ExpertLayout, padded
from ftengine.formats.matrix import PackedMatrix
from ftengine.formats.pack import unpack, unpack_expert
from ftengine.kernels import native

if native.AVAILABLE:
    from ftengine import _native


def linear_packed(matrix: PackedMatrix, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """hidden [T, columns] float32 or bfloat16 -> float32 [T, rows]; bias: [rows] float32."""
    if not native.AVAILABLE:
        return reference_linear(matrix, hidden, bias)
    out = torch.empty(len(hidden), matrix.rows)
    _native.linear_packed(
        _filled_up(hidden),
        matrix.data,
        matrix.rows,
        matrix.columns,
        matrix.format.number,
        out,
        bias=bias,
        threads=torch.get_num_threads(),
    )
    return out


def experts_packed(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    layout: ExpertLayout,
    blocks: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out[t] += sum_k weights[t, k] * down(silu(gate(hidden[t])) * up(hidden[t])) of expert expert_ids[t, k].

    hidden [T, H] float32 or bfloat16; expert_ids [T, K] int32, negative: route not taken; weights [T, K] float32;
    blocks uint8 [E, layout.block_bytes]; out [T, H] float32.
    """
    if not native.AVAILABLE:
        reference_experts(hidden, expert_ids, weights, layout, blocks, out)
        return
    _native.experts_packed(
        _filled_up(hidden),
        expert_ids,
        weights,
        blocks,
        layout.hidden,
        layout.intermediate,
        layout.gate_up.number,
        layout.down.number,
        layout.bias,
        False,
        1.702,
        7.0,
        out,
        threads=torch.get_num_threads(),
    )


def dequantize_rows(matrix: PackedMatrix, rows: torch.Tensor) -> torch.Tensor:
    """Rows [T] of a matrix as float32 [T, columns]; only their panels are read."""
    panel_bytes = matrix.format.panel_bytes(matrix.columns)
    used, place = torch.unique(rows // PANEL_ROWS, return_inverse=True)
    data = matrix.data.view(-1, panel_bytes)[used]
    out = torch.empty(len(rows), matrix.columns)
    for number, panel in enumerate(data):
        one = dequantize(unpack(PackedMatrix(matrix.format, PANEL_ROWS, matrix.columns, panel)))
        here = place == number
        out[here] = one[rows[here] % PANEL_ROWS]
    return out


def reference_linear(matrix: PackedMatrix, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(hidden.float(), dequantize(unpack(matrix)), bias)


def reference_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    layout: ExpertLayout,
    blocks: torch.Tensor,
    out: torch.Tensor,
) -> None:
    for expert in torch.unique(expert_ids[expert_ids >= 0]).tolist():
        gate, up, down, biases = unpack_expert(layout, blocks[expert])
        rows, places = (expert_ids == expert).nonzero(as_tuple=True)
        state = hidden[rows].float()
        both = [F.linear(state, dequantize(part)) for part in (gate, up)]
        if biases is not None:
            both = [both[0] + biases.gate, both[1] + biases.up]
        result = F.linear(F.silu(both[0]) * both[1], dequantize(down))
        if biases is not None:
            result += biases.down
        out.index_add_(0, rows, result * weights[rows, places].unsqueeze(1))


def _filled_up(hidden: torch.Tensor) -> torch.Tensor:
    """Columns up to a multiple of K_ALIGN, zero, as the kernels read them."""
    missing = padded(hidden.shape[1]) - hidden.shape[1]
    return F.pad(hidden, (0, missing)) if missing else hidden.contiguous()
