"""Number formats of weight matrices, and how many bytes a matrix takes in the order that kernels read.

Torch-free. `docs/ftw.md` is the specification; `csrc/formats.h` computes the same sizes and a test holds them equal.

Panel order: a matrix [N, K] is cut into panels of PANEL_ROWS rows, the last one filled up with zeros; K is filled up
with zeros to a multiple of K_ALIGN, Kp. A panel is its codes, then its scales, filled up to a multiple of PANEL_ALIGN
bytes. One vector register holds the same column(s) of the panel's 16 rows, so a row's sum stays in one lane.

Codes, r = row in the panel (0..15), all integers little-endian:
    16 and 32 bit  element (b, r, p)          at [Kp/2][16][2]  is column 2b + p
    8 bit          byte j of u16 (b, r, p)    at [Kp/4][16][2]  is column 4b + 2j + p, byte 0 the low one
    4 bit          nibble j of u16 (b, r, p)  at [Kp/8][16][2]  is column 8b + 2j + p, nibble 0 the lowest
Expanding sub-element j of every u16 thus gives the 16-bit order: pairs of columns, row by row.

Scales, by ScaleKind (value = code * scale(s)):
    ROW       float32 [16]
    BLOCK128  float32 [ceil(Kp / 128)]; 128 x 128 blocks of the matrix, so one value for a panel's 16 rows
    GROUP16   float8_e4m3 [Kp / 16][16], then float32 [16] a row (the tensor's own second scale, repeated)
    MX32      float8_e8m0 [Kp / 32][16]: 2 ** (byte - 127)
    HALF32    float16 [Kp / 32][16]
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

PANEL_ROWS = 16
PANEL_ALIGN = 64
K_ALIGN = 32
EXPERT_ALIGN = 4096


class Codes(enum.Enum):
    """How a stored element becomes a number."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    E4M3 = "e4m3"  # OCP float8 e4m3fn: 0x7f and 0xff are NaN, no infinities, largest 448
    E2M1 = "e2m1"  # OCP float4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, sign in bit 3
    INT8 = "int8"
    INT4 = "int4"  # nibble - 8


class ScaleKind(enum.Enum):
    NONE = "none"
    ROW = "row"
    BLOCK128 = "block128"
    GROUP16 = "group16"
    MX32 = "mx32"
    HALF32 = "half32"


BITS = {
    Codes.FLOAT32: 32,
    Codes.FLOAT16: 16,
    Codes.BFLOAT16: 16,
    Codes.E4M3: 8,
    Codes.INT8: 8,
    Codes.E2M1: 4,
    Codes.INT4: 4,
}


@dataclass(frozen=True)
class Format:
    """`number` is the format's id in FTW headers and in csrc/formats.h; it never changes its meaning."""

    name: str
    number: int
    codes: Codes
    scales: ScaleKind

    @property
    def bits(self) -> int:
        """Of one code; scales come on top."""
        return BITS[self.codes]

    def code_bytes(self, columns: int) -> int:
        """Of one panel's codes."""
        return PANEL_ROWS * padded(columns) * self.bits // 8

    def scale_bytes(self, columns: int) -> int:
        """Of one panel's scales, unaligned."""
        width = padded(columns)
        return {
            ScaleKind.NONE: 0,
            ScaleKind.ROW: 4 * PANEL_ROWS,
            ScaleKind.BLOCK128: 4 * -(-width // 128),
            ScaleKind.GROUP16: width // 16 * PANEL_ROWS + 4 * PANEL_ROWS,
            ScaleKind.MX32: width // 32 * PANEL_ROWS,
            ScaleKind.HALF32: 2 * (width // 32) * PANEL_ROWS,
        }[self.scales]

    def panel_bytes(self, columns: int) -> int:
        return aligned(self.code_bytes(columns) + self.scale_bytes(columns), PANEL_ALIGN)

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Of a whole matrix [rows, columns] in panel order."""
        return panels(rows) * self.panel_bytes(columns)


F32 = Format("f32", 0, Codes.FLOAT32, ScaleKind.NONE)
F16 = Format("f16", 1, Codes.FLOAT16, ScaleKind.NONE)
BF16 = Format("bf16", 2, Codes.BFLOAT16, ScaleKind.NONE)
FP8 = Format("fp8", 3, Codes.E4M3, ScaleKind.ROW)  # a scale a tensor or a channel
FP8_BLOCK = Format("fp8-block", 4, Codes.E4M3, ScaleKind.BLOCK128)
NVFP4 = Format("nvfp4", 5, Codes.E2M1, ScaleKind.GROUP16)
MXFP4 = Format("mxfp4", 6, Codes.E2M1, ScaleKind.MX32)
Q8_0 = Format("q8_0", 7, Codes.INT8, ScaleKind.HALF32)  # GGUF's
Q4_0 = Format("q4_0", 8, Codes.INT4, ScaleKind.HALF32)  # GGUF's

FORMATS = {item.name: item for item in (F32, F16, BF16, FP8, FP8_BLOCK, NVFP4, MXFP4, Q8_0, Q4_0)}
BY_NUMBER = {item.number: item for item in FORMATS.values()}


def aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def padded(columns: int) -> int:
    """Kp."""
    return aligned(columns, K_ALIGN)


def panels(rows: int) -> int:
    return -(-rows // PANEL_ROWS)


@dataclass(frozen=True)
class ExpertLayout:
    """One expert as one block of bytes: gate and up panels in turn (g0, u0, g1, u1, ...), down's panels, biases.

    gate, up: [intermediate, hidden]; down: [hidden, intermediate]. With `bias`: float32 gate bias and up bias
    [intermediate] each, then down bias [hidden], after the matrices. The block is filled up to EXPERT_ALIGN.
    """

    hidden: int
    intermediate: int
    gate_up: Format
    down: Format
    bias: bool = False

    @property
    def down_offset(self) -> int:
        return 2 * self.gate_up.matrix_bytes(self.intermediate, self.hidden)

    @property
    def bias_offset(self) -> int:
        return self.down_offset + self.down.matrix_bytes(self.hidden, self.intermediate)

    @property
    def used_bytes(self) -> int:
        return self.bias_offset + (4 * (2 * self.intermediate + self.hidden) if self.bias else 0)

    @property
    def block_bytes(self) -> int:
        return aligned(self.used_bytes, EXPERT_ALIGN)
