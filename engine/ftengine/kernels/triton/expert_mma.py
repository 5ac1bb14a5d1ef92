"""Experts of a decode step on the matrix units, codes of 4 bits, up to 16 tokens in bfloat16.

Written in Gluon, for the layouts: a warp's words are decoded in the registers in which mma.m16n8k16 wants its first
operand, so nothing goes through shared memory but the warps' sums. The order of the columns within a product is free,
and so is that of the rows: lane 4g + t holds the rows 2g and 2g + 1 of the words 2t and 2t + 1 of each eight, whose
columns share a scale. Scales go on the codes, exactly: both together are LIFT[kind] times too small for the sum.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

from ftengine.formats.format import Codes, Format, ScaleKind
from ftengine.kernels.triton.expert_tiles import GROUP16, load_row_scales, place, swiglu
from ftengine.kernels.triton.expert_turns import its_turn
from ftengine.kernels.triton.launch import INTERPRETED, start_next, wait_for_previous
from ftengine.kernels.triton.portable import bound

if INTERPRETED:
    jit: Any = triton.jit
    gl: Any = tl
else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl  # type: ignore[no-redef]
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2

    jit = gluon.jit
    swiglu, start_next, wait_for_previous, place, load_row_scales, its_turn = (
        gluon.jit(function.fn) for function in (swiglu, start_next, wait_for_previous, place, load_row_scales, its_turn)
    )

ASSEMBLY = tl.constexpr(not INTERPRETED)
LINES = tl.constexpr(16)  # rows of a panel
RUN = 64  # columns that four lanes hold of a row: eight words


def _decode() -> str:
    """PTX: two rows' words ($8) and their scales ($24: of the first, $40: of the second, twice each) -> eight pairs."""
    lines = [".reg .b32 sign, size, words<2>, minus0;", "mov.b64 {words0, words1}, $8;", "mov.b32 minus0, 0x80008000;"]
    for row in range(2):
        for pair in range(4):
            sign = f"shl.b32 sign, words{row}, {12 - 4 * pair};"
            shift = 6 - 4 * pair
            size = f"shl.b32 size, words{row}, {shift};" if shift > 0 else f"shr.b32 size, words{row}, {-shift};"
            lines += [sign, size, "and.b32 sign, sign, 0x80008000;", "and.b32 size, size, 0x01c001c0;"]
            lines += ["or.b32 sign, sign, size;", f"fma.rn.bf16x2 ${4 * row + pair}, sign, ${24 + 16 * row}, minus0;"]
    return "{" + " ".join(lines) + "}"


DECODE = tl.constexpr(_decode())
DECODE_OPERANDS = tl.constexpr(",".join(["=&r"] * 8 + ["l"] * 16 + ["r"] * 32))
# Two E4M3 bytes, of rows one below the other -> 2 ** 117 times their numbers, each twice as bfloat16.
E4M3_PAIR = tl.constexpr(
    "{.reg .b16 bytes, low, high; .reg .b32 both; .reg .f32 first, last; cvt.u16.u32 bytes, $2;"
    "cvt.rn.f16x2.e4m3x2 both, bytes; mov.b32 {low, high}, both; cvt.f32.f16 first, low; cvt.f32.f16 last, high;"
    "mul.f32 first, first, 0f7A000000; mul.f32 last, last, 0f7A000000;"
    "cvt.rn.bf16x2.f32 $0, first, first; cvt.rn.bf16x2.f32 $1, last, last;}"
)


@functools.cache
def cut(rows: int, tokens: int, warps: int, tiles: int) -> dict[str, Any]:
    """Launch constants of a kernel whose `warps` warps each take `tiles` runs of `rows` panels at a time."""
    block = 8 if tokens <= 8 else 16
    bits = range((tiles * rows).bit_length() - 1)
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    spread = range(warps.bit_length() - 1)
    codes: Any = None
    acts: Any = None
    result: Any = None
    if not INTERPRETED:
        codes = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], *([32 << bit, 0] for bit in bits)],
            lanes,
            [[32 * tiles * rows << bit, 0] for bit in spread],
            [],
            [32 * tiles * rows * warps, 16],
        )
        x_bits = range((2 * tiles).bit_length() - 1)
        acts = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], *([[32, 0]] if block == 16 else []), *([4 * block << bit, 0] for bit in x_bits)],
            lanes,
            [[8 * block * tiles << bit, 0] for bit in spread],
            [],
            [8 * block * tiles * warps, 4],
        )
        result = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    return {"CODE_LAYOUT": codes, "X_LAYOUT": acts, "SUM_LAYOUT": result, "BLOCK": block, "W": warps, "TILES": tiles}


def fits(format: Format, columns: int, warps: int, tiles: int, device: torch.device) -> bool:
    """Whether the columns are whole runs; the assembly takes compute capability 8.9. FT_MMA=0: never."""
    if os.environ.get("FT_MMA") == "0":
        return False
    known = format.codes is Codes.E2M1 and format.scales in (ScaleKind.GROUP16, ScaleKind.MX32)
    able = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)
    return known and able and columns % (RUN * tiles * warps) == 0


@jit
def span(SIZE: tl.constexpr, LAYOUT: tl.constexpr):
    if ASSEMBLY:
        return gl.arange(0, SIZE, LAYOUT)
    else:
        return tl.arange(0, SIZE)


@jit
def sums_of(
    words, scales, x, total, P: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    SCALES: tl.constexpr, CODE_LAYOUT: tl.constexpr, X_LAYOUT: tl.constexpr, SUM_LAYOUT: tl.constexpr,
):  # fmt: skip
    """total [W, 16 P, BLOCK] + words int64 [32 TILES P W] times x int64 [8 BLOCK TILES W], four columns each."""
    first, last = pair_scales(scales, SCALES)
    if ASSEMBLY:
        spread = gl.zeros((words.shape[0], 16), gl.int32, CODE_LAYOUT)
        a = gl.inline_asm_elementwise(
            DECODE, DECODE_OPERANDS,
            [words[:, None] + spread.to(gl.int64), first[:, None] + spread, last[:, None] + spread],
            gl.bfloat16, True, 16,
        )  # fmt: skip
        wide = gl.zeros((x.shape[0], 4), gl.int64, X_LAYOUT)
        b = gl.inline_asm_elementwise(
            "mov.b64 {$0, $1}, $2;", "=r,=r,l,l,l,l", [x[:, None] + wide], gl.bfloat16, True, 4
        )  # fmt: skip
    else:
        column = tl.arange(0, 16)[None, :]
        code = (words[:, None] >> (32 * (column // 8) + 16 * (column % 2) + 4 * (column // 2 % 4))).to(tl.int32)
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        scale = tl.where(column < 8, first[:, None], last[:, None]) << 16
        a = bits.to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)
        part = (x[:, None] >> (16 * tl.arange(0, 4)[None, :])).to(tl.int32)
        b = (part << 16).to(tl.float32, bitcast=True)
    a = gl.reshape(a, (W, P, TILES, 8, 4, 2, 2, 2, 2))
    a = gl.reshape(gl.permute(a, (0, 1, 5, 3, 2, 6, 7, 4, 8)), (W, 16 * P, 32 * TILES))
    b = gl.permute(gl.reshape(b, (W, TILES, 2, BLOCK, 4, 2, 2)), (0, 1, 2, 5, 4, 6, 3))
    b = gl.reshape(b, (W, 32 * TILES, BLOCK))
    if ASSEMBLY:
        a = gl.convert_layout(a, gl.DotOperandLayout(0, SUM_LAYOUT, 2))
        b = gl.convert_layout(b, gl.DotOperandLayout(1, SUM_LAYOUT, 2))
        return mma_v2(a, b, total)
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@jit
def pair_scales(stored, SCALES: tl.constexpr):
    """Two rows' scales, bytes of int32 -> each twice as bfloat16, times 2 ** 117 (E4M3) or 2 ** 64 (E8M0)."""
    if ASSEMBLY and SCALES == GROUP16:
        return gl.inline_asm_elementwise(E4M3_PAIR, "=&r,=&r,r", [stored], (gl.int32, gl.int32), True, 1)
    else:
        return half_scale(stored & 255, SCALES), half_scale(stored >> 8, SCALES)


@jit
def half_scale(byte, SCALES: tl.constexpr):
    if SCALES == GROUP16:
        bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
        number = bits.to(tl.float32, bitcast=True) * 2.0**120 * 2.0**117
    else:
        number = gl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True) * 2.0**64
    upper = (number.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return upper | (upper << 16)


@jit
def load_run(
    blocks, slot, panel, run, g, t, mask, ODD: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr,
):  # fmt: skip
    """int64: rows 2g and 2g + 1 of word 2t + ODD of a run of eight words."""
    at = place(slot, panel, 8, SLOT_BYTES, BASE, PANEL_BYTES) + ((run * 8 + 2 * t + ODD) * 8 + g)
    return gl.load(blocks.to(gl.pointer_type(gl.int64)) + at, mask, 0)


@jit
def load_pair_scales(
    blocks, slot, panel, run, g, t, mask, SCALES: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    group = run * 4 + t if SCALES == GROUP16 else run * 2 + t // 2
    at = place(slot, panel, 2, SLOT_BYTES, BASE, PANEL_BYTES) + (CODE_BYTES // 2 + group * 8 + g)
    return gl.load(blocks.to(gl.pointer_type(gl.uint16)) + at, mask, 0).to(gl.int32)


@jit
def row_of(m):
    """A panel's row by its place in the product."""
    return m % 8 * 2 + m // 8 % 2


@jit
def gate_up_mma(
    x, x_stride, tokens, blocks, count, slots, turn, ready, scratch, expert_stride, token_stride,
    INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
    CODE_LAYOUT: tl.constexpr, X_LAYOUT: tl.constexpr, SUM_LAYOUT: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """One pair of panels of one expert a program, for all tokens at once: also those that do not use it."""
    pair = gl.program_id(0)
    u, slot, there = its_turn(gl.program_id(1), count, slots, turn, ready, EARLY, PDL)
    if there:
        rows: tl.constexpr = gl.SliceLayout(1, CODE_LAYOUT) if ASSEMBLY else None
        line = span(64 * TILES * W, rows)
        t, g, tile = line % 4, line // 4 % 8, line // 32 % TILES
        panel, warp = 2 * pair + line // (32 * TILES) % 2, line // (64 * TILES)
        columns: tl.constexpr = gl.SliceLayout(1, X_LAYOUT) if ASSEMBLY else None
        at = span(8 * BLOCK * TILES * W, columns)
        x_t, x_token, x_half = at % 4, gl.minimum(at // 4 % BLOCK, tokens - 1), at // (4 * BLOCK) % 2
        x_tile, x_warp = at // (8 * BLOCK) % TILES, at // (8 * BLOCK * TILES)
        fours = x.to(gl.pointer_type(gl.int64)) + x_token * (x_stride // 4)
        total = zeros(W, 32, BLOCK, SUM_LAYOUT)
        for first in range(0, WORDS // 8, W * TILES):
            run, x_run = first + warp * TILES + tile, first + x_warp * TILES + x_tile
            even = load_run(blocks, slot, panel, run, g, t, line >= 0, 0, SLOT_BYTES, BASE, PANEL_BYTES)
            odd = load_run(blocks, slot, panel, run, g, t, line >= 0, 1, SLOT_BYTES, BASE, PANEL_BYTES)
            scale = load_pair_scales(
                blocks, slot, panel, run, g, t, line >= 0, SCALES, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES
            )  # fmt: skip
            four = (x_run * 8 + 2 * x_t) * 2 + x_half
            x_even, x_odd = gl.load(fours + four), gl.load(fours + four + 2)
            total = sums_of(
                even, scale, x_even, total, 2, W, TILES, BLOCK, SCALES, CODE_LAYOUT, X_LAYOUT, SUM_LAYOUT
            )  # fmt: skip
            total = sums_of(
                odd, scale, x_odd, total, 2, W, TILES, BLOCK, SCALES, CODE_LAYOUT, X_LAYOUT, SUM_LAYOUT
            )  # fmt: skip
        sums = gl.sum(total, 0) * (2.0**9 if SCALES == GROUP16 else 2.0**62)
        if SCALES == GROUP16:
            m = span(32, gl.SliceLayout(1, gl.SliceLayout(0, SUM_LAYOUT)) if ASSEMBLY else None)
            sums *= load_row_scales(
                blocks, slot, 2 * pair + m // 16, row_of(m), m >= 0,
                SCALES, COLUMNS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
            )[:, None]  # fmt: skip
        gate, up = gl.split(gl.permute(gl.reshape(sums, (2, 16, BLOCK)), (1, 2, 0)))
        act = swiglu(gate, up)
        FLAT: tl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, W], [0, 1]) if ASSEMBLY else None
        if ASSEMBLY:
            act = gl.convert_layout(act, FLAT)
        n = pair * 16 + row_of(span(16, gl.SliceLayout(1, FLAT) if ASSEMBLY else None))[:, None]
        token = span(BLOCK, gl.SliceLayout(0, FLAT) if ASSEMBLY else None)[None, :]
        target = scratch + (u * expert_stride + token * token_stride + n)
        gl.store(target, act.to(scratch.dtype.element_ty), (n < INTERMEDIATE) & (token < tokens))


@jit
def down_mma(
    scratch, expert_stride, token_stride, tokens, blocks, count, slots, combine, combine_stride, out, out_stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
    CODE_LAYOUT: tl.constexpr, X_LAYOUT: tl.constexpr, SUM_LAYOUT: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """One panel's rows of all experts a program: TILES runs of an expert a warp, W such parts at a time."""
    panel = gl.program_id(0)
    line = span(32 * TILES * W, gl.SliceLayout(1, CODE_LAYOUT) if ASSEMBLY else None)
    t, g, tile, warp = line % 4, line // 4 % 8, line // 32 % TILES, line // (32 * TILES)
    at = span(8 * BLOCK * TILES * W, gl.SliceLayout(1, X_LAYOUT) if ASSEMBLY else None)
    x_t, x_token, x_half = at % 4, gl.minimum(at // 4 % BLOCK, tokens - 1), at // (4 * BLOCK) % 2
    x_tile, x_warp = at // (8 * BLOCK) % TILES, at // (8 * BLOCK * TILES)
    part = span(W, gl.SliceLayout(1, gl.SliceLayout(2, SUM_LAYOUT)) if ASSEMBLY else None)
    m = span(16, gl.SliceLayout(0, gl.SliceLayout(2, SUM_LAYOUT)) if ASSEMBLY else None)
    of = span(W, gl.SliceLayout(1, gl.SliceLayout(1, SUM_LAYOUT)) if ASSEMBLY else None)
    token = span(BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, SUM_LAYOUT)) if ASSEMBLY else None)[None, :]
    each: tl.constexpr = WORDS // (8 * TILES)  # parts of an expert
    # Blocks and routes are there before gate_up lets this kernel start (expert_turns.py).
    parts = gl.load(count) * each
    even, odd, scale = load_part(
        warp, parts, tile, panel, g, t, blocks, slots,
        TILES, each, SCALES, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
    )  # fmt: skip
    wait_for_previous(PDL)
    start_next(PDL)
    total = zeros(W, 16, BLOCK, SUM_LAYOUT)
    for first in range(0, bound(parts), W):
        u, run = (first + x_warp) // each, (first + x_warp) % each * TILES + x_tile
        four = u * (expert_stride // 4) + x_token * (token_stride // 4) + (run * 8 + 2 * x_t) * 2 + x_half
        fours, known = scratch.to(gl.pointer_type(gl.int64)) + four, first + x_warp < parts
        x_even, x_odd = gl.load(fours, known, 0), gl.load(fours + 2, known, 0)
        sums = zeros(W, 16, BLOCK, SUM_LAYOUT)
        sums = sums_of(
            even, scale, x_even, sums, 1, W, TILES, BLOCK, SCALES, CODE_LAYOUT, X_LAYOUT, SUM_LAYOUT
        )  # fmt: skip
        sums = sums_of(
            odd, scale, x_odd, sums, 1, W, TILES, BLOCK, SCALES, CODE_LAYOUT, X_LAYOUT, SUM_LAYOUT
        )  # fmt: skip
        even, odd, scale = load_part(
            first + W + warp, parts, tile, panel, g, t, blocks, slots,
            TILES, each, SCALES, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
        )  # fmt: skip
        there = (first + of < parts)[:, None] & (token < tokens)
        weight = gl.load(combine + (((first + of) // each)[:, None] * combine_stride + token), there, 0.0)
        if SCALES == GROUP16:
            mask = first + part < parts
            slot = gl.load(slots + (first + part) // each, mask, 0)
            rows = row_of(m)[None, :]
            sums *= load_row_scales(
                blocks, slot[:, None], panel, rows, mask[:, None] & (rows >= 0),
                SCALES, COLUMNS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
            )[:, :, None]  # fmt: skip
        total += gl.where((weight != 0.0)[:, None, :], sums * weight[:, None, :], 0.0)
    result = gl.sum(total, 0) * (2.0**9 if SCALES == GROUP16 else 2.0**62)
    n = panel * 16 + row_of(span(16, gl.SliceLayout(1, gl.SliceLayout(0, SUM_LAYOUT)) if ASSEMBLY else None))[:, None]
    line = span(BLOCK, gl.SliceLayout(0, gl.SliceLayout(0, SUM_LAYOUT)) if ASSEMBLY else None)[None, :]
    target, mask = out + (line * out_stride + n), (n < HIDDEN) & (line < tokens)
    gl.store(target, gl.load(target, mask, 0.0) + result, mask)


@jit
def load_part(
    part, parts, tile, panel, g, t, blocks, slots, TILES: tl.constexpr, EACH: tl.constexpr,
    SCALES: tl.constexpr, SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """Words and scales of one run of the expert's; part: number of TILES runs among those of all experts."""
    mask = part < parts
    slot, run = gl.load(slots + part // EACH, mask, 0), part % EACH * TILES + tile
    even = load_run(blocks, slot, panel, run, g, t, mask, 0, SLOT_BYTES, BASE, PANEL_BYTES)
    odd = load_run(blocks, slot, panel, run, g, t, mask, 1, SLOT_BYTES, BASE, PANEL_BYTES)
    return even, odd, load_pair_scales(
        blocks, slot, panel, run, g, t, mask, SCALES, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES
    )  # fmt: skip


@jit
def zeros(W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr):
    if ASSEMBLY:
        return gl.zeros((W, ROWS, BLOCK), gl.float32, LAYOUT)
    else:
        return tl.zeros((W, ROWS, BLOCK), tl.float32)
