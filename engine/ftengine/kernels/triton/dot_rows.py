"""Inside kernels: a tile of whole rows, as stored, times a vector, by plain multiplications in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from ftengine.kernels.triton.decode import E2M1_LIFT, group_scales, nibbles, numbers, octets, quads


@triton.jit
def halved(x):
    """Even and odd elements of a vector."""
    return tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))


@triton.jit
def element_sums(codes, x, FORMAT: tl.constexpr, PACKED: tl.constexpr):
    """Codes [BLOCK_N, BLOCK_K / PACKED] times x [BLOCK_K], added up where they share an element of `codes`."""
    if PACKED == 1:
        sums = numbers(codes, FORMAT) * x[None, :]
    elif PACKED == 2:
        even, odd = halved(x)
        low, high = nibbles(codes, FORMAT)
        sums = low * even[None, :] + high * odd[None, :]
    elif PACKED == 4:
        even, odd = halved(x)
        x0, x2 = halved(even)
        x1, x3 = halved(odd)
        n0, n1, n2, n3 = quads(codes, FORMAT)
        sums = n0 * x0[None, :] + n1 * x1[None, :] + n2 * x2[None, :] + n3 * x3[None, :]
    else:
        even, odd = halved(x)
        x04, x26 = halved(even)
        x15, x37 = halved(odd)
        x0, x4 = halved(x04)
        x1, x5 = halved(x15)
        x2, x6 = halved(x26)
        x3, x7 = halved(x37)
        n0, n1, n2, n3, n4, n5, n6, n7 = octets(codes, FORMAT)
        sums = n0 * x0[None, :] + n1 * x1[None, :] + n2 * x2[None, :] + n3 * x3[None, :]
        sums += n4 * x4[None, :] + n5 * x5[None, :] + n6 * x6[None, :] + n7 * x7[None, :]
    return sums


@triton.jit
def dot_rows(codes, scale, x, FORMAT: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr):
    """[BLOCK_N, BLOCK_K / PACKED] codes times x [BLOCK_K] -> float32 [BLOCK_N], without the row scale."""
    BLOCK_N: tl.constexpr = codes.shape[0]
    BLOCK_K: tl.constexpr = x.shape[0]
    sums = element_sums(codes, x, FORMAT, PACKED)
    if GROUP > 0:
        sums = tl.sum(tl.reshape(sums, (BLOCK_N, BLOCK_K // GROUP, GROUP // PACKED)), 2)
        if PACKED == 8 and FORMAT != "q4_0":
            sums *= E2M1_LIFT
        sums *= group_scales(scale, FORMAT)
    elif FORMAT == "fp8-block":
        blocks = tl.reshape(sums, (BLOCK_N, BLOCK_K // 128, 128 // PACKED)) * scale[None, :, None]
        sums = tl.reshape(blocks, (BLOCK_N, BLOCK_K // PACKED))
    return tl.sum(sums, 1)
