"""Inside kernels: from stored codes and scales to numbers. FORMAT is a `Format.name`; formats/format.py explains them.

Shared by all kernels that read matrices in natural order. Everything is exact: a 4 bit code times its 8 bit scale fits
bfloat16, and so does an E4M3 code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftengine.formats.format import Format, ScaleKind
from ftengine.kernels.triton.launch import INTERPRETED

ASSEMBLY = tl.constexpr(not INTERPRETED)
E2M1_LIFT = tl.constexpr(2.0**14)


def _e2m1_octet() -> str:
    """PTX: eight codes of $8 -> float32 in $0..$7. Codes i and i + 4 go to the upper ends of two 16-bit lanes, sign and
    magnitude to where float16 has them: the biases differ by 14, subnormal numbers come out right."""
    lines = [".reg .b32 sign, size;", ".reg .b16 low, high;"]
    for code in range(4):
        size = f"shl.b32 size, $8, {9 - 4 * code};" if code < 3 else "shr.b32 size, $8, 3;"
        lines += [f"shl.b32 sign, $8, {12 - 4 * code};", size]
        lines += ["and.b32 sign, sign, 0x80008000;", "and.b32 size, size, 0x0e000e00;", "or.b32 sign, sign, size;"]
        lines += ["mov.b32 {low, high}, sign;"]
        lines += [f"cvt.f32.f16 ${code}, low;", f"cvt.f32.f16 ${code + 4}, high;"]
    return "{" + " ".join(lines) + "}"


E2M1_OCTET = tl.constexpr(_e2m1_octet())
E4M3_QUAD = tl.constexpr(
    "{.reg .b32 pair; .reg .b16 first, last, low, high; mov.b32 {first, last}, $4;"
    "cvt.rn.f16x2.e4m3x2 pair, first; mov.b32 {low, high}, pair; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;"
    "cvt.rn.f16x2.e4m3x2 pair, last; mov.b32 {low, high}, pair; cvt.f32.f16 $2, low; cvt.f32.f16 $3, high;}"
)

GROUPS = {ScaleKind.GROUP16: 16, ScaleKind.MX32: 32, ScaleKind.HALF32: 32}


def group_of(kind: Format) -> int:
    """Columns that share one scale of their row; 0 where a scale is a row's, a block's, or there is none."""
    return GROUPS.get(kind.scales, 0)


def codes_per_element(kind: Format) -> int:
    """Codes in one element of QuantMatrix.codes."""
    return 2 if kind.bits == 4 else 1


@triton.jit
def e2m1(codes):
    """Integer codes 0..15 -> float32, E2M1_LIFT times too small: their bits are where float16 has its."""
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e4m3(codes):
    """uint8 -> float32; 0x7f and 0xff are NaN."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e8m0(codes):
    """uint8 -> float32, 2 ** (code - 127); 255 is NaN."""
    wide = codes.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def numbers(codes, FORMAT: tl.constexpr):
    """Codes of 8 bits and more as float32, without their scale."""
    if FORMAT == "fp8" or FORMAT == "fp8-block":
        return e4m3(codes)
    else:
        return codes.to(tl.float32)


@triton.jit
def nibbles(codes, FORMAT: tl.constexpr):
    """Bytes of two codes -> float32 numbers of the even and of the odd columns, without their scale."""
    low, high = (codes & 15).to(tl.int32), (codes >> 4).to(tl.int32)
    if FORMAT == "q4_0":
        return (low - 8).to(tl.float32), (high - 8).to(tl.float32)
    else:
        return e2m1(low) * E2M1_LIFT, e2m1(high) * E2M1_LIFT


@triton.jit
def nibble(words, PLACE: tl.constexpr, FORMAT: tl.constexpr):
    code = (words >> (4 * PLACE)) & 15
    if FORMAT == "q4_0":
        return (code - 8).to(tl.float32)
    else:
        return e2m1(code)


@triton.jit
def octets(words, FORMAT: tl.constexpr):
    """int32 of eight codes -> their float32 numbers, without their scale, E2M1's E2M1_LIFT times too small."""
    if ASSEMBLY and FORMAT != "q4_0":
        kinds: tl.constexpr = (tl.float32,) * 8
        return tl.inline_asm_elementwise(E2M1_OCTET, "=f,=f,=f,=f,=f,=f,=f,=f,r", [words], kinds, True, 1)
    else:
        return (
            nibble(words, 0, FORMAT),
            nibble(words, 1, FORMAT),
            nibble(words, 2, FORMAT),
            nibble(words, 3, FORMAT),
            nibble(words, 4, FORMAT),
            nibble(words, 5, FORMAT),
            nibble(words, 6, FORMAT),
            nibble(words, 7, FORMAT),
        )


@triton.jit
def byte(words, PLACE: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT == "q8_0":
        return ((words << (24 - 8 * PLACE)) >> 24).to(tl.float32)
    else:
        return e4m3(((words >> (8 * PLACE)) & 255).to(tl.uint8))


@triton.jit
def quads(words, FORMAT: tl.constexpr):
    """int32 of four codes -> their float32 numbers, without their scale."""
    if ASSEMBLY and FORMAT != "q8_0":
        kinds: tl.constexpr = (tl.float32,) * 4
        return tl.inline_asm_elementwise(E4M3_QUAD, "=f,=f,=f,=f,r", [words], kinds, True, 1)
    else:
        return byte(words, 0, FORMAT), byte(words, 1, FORMAT), byte(words, 2, FORMAT), byte(words, 3, FORMAT)


@triton.jit
def group_scales(scales, FORMAT: tl.constexpr):
    """Stored scales of groups as float32."""
    if FORMAT == "nvfp4":
        return e4m3(scales)
    elif FORMAT == "mxfp4":
        return e8m0(scales)
    else:
        return scales.to(tl.float32)
