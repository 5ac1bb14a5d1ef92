"""RMSNorm and the gated activation between two products, row by row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.launch import PDL, launch_options, start_next, wait_for_previous

ACT_TILE = 1024


def rms_norm(residual: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """out [T, H] act = residual / sqrt(mean(residual^2) + epsilon) * weight, for residual float32 [T, H].

    weight: float32 [H]. Rows may have any stride. Source: https://arxiv.org/abs/1910.07467.
    """
    tokens, hidden = residual.shape
    if not tokens:
        return
    block = triton.next_power_of_2(hidden)
    _rms_norm[(tokens,)](
        residual,
        weight,
        out,
        residual.stride(0),
        out.stride(0),
        epsilon,
        K=hidden,
        BLOCK=block,
        PDL=PDL,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(),
    )


def swiglu_act(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, I] act = silu(gate) * up; gate_up float32 [T, 2I], gate's columns first. Rows may have any stride."""
    tokens, intermediate = out.shape
    if not tokens:
        return
    grid = (tokens, triton.cdiv(intermediate, ACT_TILE))
    _swiglu[grid](
        gate_up, out, gate_up.stride(0), out.stride(0), intermediate, TILE=ACT_TILE, PDL=PDL, **launch_options()
    )


@triton.jit
def _rms_norm(
    residual, weight, out, stride, out_stride, epsilon, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < K
    factor = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_previous(PDL)
    start_next(PDL)
    values = tl.load(residual + token * stride + column, mask=mask, other=0.0)
    normal = values * tl.math.rsqrt(tl.sum(values * values, 0) / K + epsilon) * factor
    tl.store(out + token * out_stride + column, normal.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu(gate_up, out, stride, out_stride, intermediate, TILE: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < intermediate
    wait_for_previous(PDL)
    start_next(PDL)
    gate = tl.load(gate_up + token * stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up + token * stride + intermediate + column, mask=mask, other=0.0)
    product = gate / (1.0 + tl.exp(tl.minimum(-gate, 88.0))) * up  # beyond 88 e^x is infinite
    tl.store(out + token * out_stride + column, product.to(out.dtype.element_ty), mask=mask)
