"""The activation of a shared expert whose output a gate of its own scales, row by row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.launch import PDL, launch_options, start_next, wait_for_previous

TILE = 512


def gated_swiglu_act(gate_up: torch.Tensor, gates: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [T, I] act = sigmoid(gates) * silu(gate) * up; capturable.

    The gate of the expert's output is applied here, before its last product, which is linear: so the shared expert
    needs nothing but its own projection. gate_up: float32 [T, 2I], gate's columns first; gates: float32 [T] logits, or
    None for 1. Rows may have any stride.
    """
    tokens, intermediate = out.shape
    _gated_swiglu[(tokens, triton.cdiv(intermediate, TILE))](
        gate_up, gate_up.stride(0), gate_up if gates is None else gates, 0 if gates is None else gates.stride(0),
        out, out.stride(0), intermediate,
        GATED=gates is not None, TILE=TILE, PDL=PDL, num_warps=4, **launch_options(),
    )  # fmt: skip


@triton.jit
def _gated_swiglu(
    gate_up, stride, gates, gates_stride, out, out_stride, intermediate,
    GATED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < intermediate
    wait_for_previous(PDL)
    start_next(PDL)
    gate = tl.load(gate_up + token * stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up + token * stride + intermediate + column, mask=mask, other=0.0)
    product = gate * tl.sigmoid(gate) * up
    if GATED:
        product *= tl.sigmoid(tl.load(gates + token * gates_stride))
    tl.store(out + token * out_stride + column, product.to(out.dtype.element_ty), mask=mask)
