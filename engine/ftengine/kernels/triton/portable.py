"""What differs between GPUs, and between them and Triton's interpreter, for kernels that run on all."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ftengine.kernels.triton.launch import INTERPRETED


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else int(value.handle.data.item())


def _same(value):
    return value


# For bounds of loops that are known on the device only: range(bound(start), bound(end)). The interpreter cannot count
# with its own scalars under numpy 2.4, where an array of one element is no integer.
bound: Any = _integer if INTERPRETED else triton.jit(_same)

EXACT_DOT = INTERPRETED  # the interpreter would multiply bfloat16's bit patterns


@dataclass(frozen=True)
class Tile:
    """How a program of attention is cut."""

    rows: int  # of queries, heads that share keys each on its own
    keys: int  # in one go of the loop
    warps: int
    stages: int  # of the loop: how many goes are under way


@triton.jit
def dot(a, b, total, EXACT: tl.constexpr):
    """total + a @ b in float32. EXACT: each product too, as if in float32, of whatever type; else a and b are of one
    16-bit type."""
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow, and exact where exp(x) is small beside 1."""
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-4, small - 0.5 * small * small, tl.log(1.0 + small))


@functools.cache
def large_shared_memory(device: torch.device) -> bool:
    """Whether a program may have the 160 KB and more of a data centre's GPU, not some 100 KB."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) in {(8, 0), (9, 0), (10, 0), (10, 3)}
