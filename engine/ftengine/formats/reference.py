"""Quantizing in plain torch, a block of rows at a time: what csrc/quantize.cpp is held equal to."""

from __future__ import annotations

import torch

from ftengine.formats.format import Codes, Format, ScaleKind
from ftengine.formats.tables import E2M1_MAX, E4M3_MAX, SMALLEST_SCALE, e4m3, e8m0, nearest_e2m1

Parts = tuple[torch.Tensor, torch.Tensor]  # codes and scales, as QuantMatrix has them


def quantize_rows(values: torch.Tensor, target: Format, second: torch.Tensor) -> Parts:
    """values: [rows, columns] float32, finite, the rows a multiple of 128 unless they are the last ones of a matrix.

    second: NVFP4's scale of the whole matrix; others do not look at it.
    """
    if target.scales is ScaleKind.ROW:
        return _fp8_rows(values)
    if target.scales is ScaleKind.BLOCK128:
        return _fp8_blocks(values)
    if target.scales is ScaleKind.GROUP16:
        return _nvfp4(values, second)
    if target.scales is ScaleKind.MX32:
        return _mxfp4(values)
    return _q8_0(values) if target.codes is Codes.INT8 else _q4_0(values)


def _fp8_rows(values: torch.Tensor) -> Parts:
    scales = (_amax(values, 1) / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    return _nearest_e4m3(values / scales[:, None]), scales


def _fp8_blocks(values: torch.Tensor) -> Parts:
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(-(-rows // 128), 128, -(-columns // 128), 128)
    scales = (blocks.abs().amax((1, 3)) / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    codes = _nearest_e4m3(blocks / scales[:, None, :, None]).view(padded.shape)
    return codes[:rows, :columns].contiguous(), scales


def _nvfp4(values: torch.Tensor, second: torch.Tensor) -> Parts:
    columns = values.shape[1]
    groups = _groups(values, 16)
    scales = _nearest_e4m3(_amax(groups, 2) / (E2M1_MAX * second))
    step = e4m3(scales) * second
    # A group far below the matrix's largest value has the scale zero, and all its codes are zero then.
    numbers = torch.where(step[..., None] > 0, groups / step[..., None], 0.0)
    return _nibbles(nearest_e2m1(numbers), columns), scales


def _mxfp4(values: torch.Tensor) -> Parts:
    columns = values.shape[1]
    groups = _groups(values, 32)
    # frexp gives a mantissa in [0.5, 1): floor(log2(amax)) is its exponent - 1; the largest power in E2M1 is 2 ** 2.
    exponent = torch.frexp(_amax(groups, 2)).exponent - 1 - 2
    scales = torch.where(_amax(groups, 2) > 0, (exponent + 127).clamp(0, 254), 127).to(torch.uint8)
    return _nibbles(nearest_e2m1(groups / e8m0(scales)[..., None]), columns), scales


def _q8_0(values: torch.Tensor) -> Parts:
    rows, columns = values.shape
    groups = _groups(values, 32)
    step = _amax(groups, 2) / 127
    codes = _half_away(groups * _inverse(step)[..., None]).to(torch.int8)
    return codes.view(rows, -1)[:, :columns].contiguous(), step.half()


def _q4_0(values: torch.Tensor) -> Parts:
    columns = values.shape[1]
    groups = _groups(values, 32)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2) if groups.numel() else groups[..., 0]
    step = extreme / -8
    codes = (groups * _inverse(step)[..., None] + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return _nibbles(codes, columns), step.half()


def _groups(values: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, groups, width]."""
    rows, columns = values.shape
    return torch.nn.functional.pad(values, (0, -columns % width)).view(rows, -(-columns // width), width)


def _amax(values: torch.Tensor, dim: int) -> torch.Tensor:
    return values.abs().amax(dim) if values.shape[dim] else values.new_zeros(values.shape[:dim])


def _nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _nibbles(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """[rows, groups, width] codes below 16 -> bytes [rows, ceil(columns / 2)], the even column in the low nibble."""
    pairs = codes.flatten(1)
    return (pairs[:, 0::2] | (pairs[:, 1::2] << 4))[:, : -(-columns // 2)].contiguous()


def _inverse(step: torch.Tensor) -> torch.Tensor:
    return torch.where(step != 0, 1 / step, 0.0)


def _half_away(values: torch.Tensor) -> torch.Tensor:
    return torch.sign(values) * torch.floor(values.abs() + 0.5)
