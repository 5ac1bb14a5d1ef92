"""What foretells a MoE layer's routing: its router, asked of the layer before (kernels/triton/prefetch.py)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ftengine.formats.format import ScaleKind
from ftengine.formats.matrix import QuantMatrix
from ftengine.layers.rms_norm import RmsNorm
from ftengine.models.gpu.weights import DeviceMoe

SMALLEST_NORM = 1e-3  # a norm's weights below this are not divided by


def next_routers(moes: Sequence[DeviceMoe]) -> dict[int, QuantMatrix]:
    """By the index of a MoE layer: [E, H], which says of that layer's normalized input what the next MoE layer's router
    would say if that were its own. Without those whose next router is not BF16, F16 or F32.

    moes: all of a model, in order. Takes as much memory as memory/estimate.py says. Waits for the device: `linear` may
    read weights ahead of the kernels before it.
    """
    asked = {this.index: _asked_early(after, this.norm) for this, after in pairwise(moes)}
    found = {index: router for index, router in asked.items() if router is not None}
    if found and moes[0].norm.weight.is_cuda:
        torch.cuda.synchronize(moes[0].norm.weight.device)
    return found


def _asked_early(layer: DeviceMoe, norm: RmsNorm) -> QuantMatrix | None:
    """The router of `layer` for rows that were normalized with another layer's `norm`: both norms divide by nearly the
    same, so only their weights are exchanged.
    """
    first = layer.projection.parts[0]  # begins with the router's rows
    if first.format.scales is not ScaleKind.NONE or first.rows < layer.experts:
        return None
    mine, theirs = norm.weight.float(), layer.norm.weight.float()
    ratio = torch.where(mine.abs() < SMALLEST_NORM, 0.0, theirs / mine)
    codes = first.codes[: layer.experts].float() * ratio
    return QuantMatrix(first.format, layer.experts, first.columns, codes.to(first.codes.dtype))
