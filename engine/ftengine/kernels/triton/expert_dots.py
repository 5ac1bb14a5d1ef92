"""Experts of a decode step on the matrix units: 2 to 16 tokens in bfloat16, formats whose codes fit that exactly.

A tile is [SPLIT, rows, 32 words]: each of the SPLIT runs of 32 words of a row is a product of its own, so that warps
share the sum over columns and not the few rows; the runs' sums are added in the end. A run of 32 words is 128 columns
by 8 bits: the blocks' scales go on its sum. Scales of 16 and 32 columns go on the codes, still exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftengine.formats.format import BF16, FP8, FP8_BLOCK, MXFP4, NVFP4
from ftengine.kernels.triton.expert_tiles import (
    BLOCK128,
    E2M1,
    E4M3,
    GROUP16,
    LIFT,
    MX32,
    ROW,
    ROWS,
    bfloat16_words,
    halves,
    load_row_scales,
    load_scales,
    load_words,
    scale_numbers,
    swiglu,
)
from ftengine.kernels.triton.expert_turns import its_turn
from ftengine.kernels.triton.launch import start_next, wait_for_previous
from ftengine.kernels.triton.portable import bound, dot

DOT_FORMATS = (NVFP4, MXFP4, FP8, FP8_BLOCK, BF16)
RUN = tl.constexpr(32)


@triton.jit
def run_sums(
    low, scale, x, row, word, mask, total, CODES: tl.constexpr, SCALES: tl.constexpr, WORD: tl.constexpr,
    COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """total [SPLIT, rows, tokens] + words [SPLIT, rows, RUN] times x, whose pairs of columns are at row + pair.

    row: [1 or SPLIT, 1, tokens], in pairs; word: [SPLIT, RUN, 1]; mask: [SPLIT, RUN, tokens].
    """
    pairs = x.to(tl.pointer_type(tl.uint32))
    for j in tl.static_range(WORD // 2):
        pair = word * (WORD // 2) + j
        both = tl.load(pairs + (row + pair), mask & (pair < COLUMNS // 2), 0)
        even_x, odd_x = halves(both, EXACT)
        even, odd = halves(bfloat16_words(low, j, CODES), EXACT)
        if CODES == E2M1 or CODES == E4M3:  # noqa: SIM109
            even_x, odd_x = (even_x * LIFT).to(even_x.dtype), (odd_x * LIFT).to(odd_x.dtype)
            even, odd = (even * scale).to(even.dtype), (odd * scale).to(odd.dtype)
        total = dot(even, even_x, total, EXACT)
        total = dot(odd, odd_x, total, EXACT)
    return total


@triton.jit
def code_scales(
    blocks, slot, panel, word, row, mask,
    CODES: tl.constexpr, SCALES: tl.constexpr, WORD: tl.constexpr, SLOT_BYTES: tl.constexpr, BASE: tl.constexpr,
    PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What codes are multiplied by: with LIFT it makes up for codes that are too small."""
    if SCALES == GROUP16 or SCALES == MX32:  # noqa: SIM109
        stored = load_scales(
            blocks, slot, panel, word, row, mask,
            CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
        )  # fmt: skip
        scale = scale_numbers(stored, SCALES) * 2.0**64
        return scale if EXACT else scale.to(tl.bfloat16)
    else:
        return 2.0**58


@triton.jit
def run_scales(
    blocks, slot, panel, run, row, mask, SCALES: tl.constexpr, COLUMNS: tl.constexpr, CODES: tl.constexpr,
    WORD: tl.constexpr, SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """What the sums of runs are multiplied by, float32 [SPLIT or 1, rows, 1]: scales of rows and of blocks."""
    if SCALES == BLOCK128:
        return load_scales(
            blocks, slot, panel, run * RUN, row, mask,
            CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
        )  # fmt: skip
    elif SCALES == ROW or SCALES == GROUP16:  # noqa: SIM109
        return load_row_scales(
            blocks, slot, panel, row, mask, SCALES, COLUMNS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES
        )
    else:
        return 1.0


@triton.jit
def gate_up_dots(
    x, x_stride, tokens, blocks, count, slots, turn, ready, scratch, expert_stride, token_stride,
    INTERMEDIATE: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr, PANELS: tl.constexpr, PDL: tl.constexpr,
    EXACT: tl.constexpr, EARLY: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """PANELS pairs of panels of one expert a program, for all tokens: those that do not use it are never read."""
    group = tl.program_id(0)
    u, slot, there = its_turn(tl.program_id(1), count, slots, turn, ready, EARLY, PDL)
    if not there:
        return
    height: tl.constexpr = 2 * PANELS * ROWS
    r = tl.arange(0, height)[None, :, None]
    panel, row = group * (2 * PANELS) + r // ROWS, r % ROWS
    inside = panel < 2 * ((INTERMEDIATE + ROWS - 1) // ROWS)
    token = tl.arange(0, TOKENS)[None, None, :]
    total = tl.zeros((SPLIT, height, TOKENS), tl.float32)
    for first in tl.range(0, (WORDS + RUN - 1) // RUN, SPLIT):
        run = first + tl.arange(0, SPLIT)[:, None, None]
        word, x_word = run * RUN + tl.arange(0, RUN)[None, None, :], run * RUN + tl.arange(0, RUN)[None, :, None]
        mask = inside & (word < WORDS)
        low, _ = load_words(blocks, slot, panel, word, row, mask, CODES, SLOT_BYTES, BASE, PANEL_BYTES)
        scale = code_scales(
            blocks, slot, panel, word, row, mask,
            CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES, EXACT,
        )  # fmt: skip
        x_mask = (x_word < WORDS) & (token < tokens)
        if SCALES == BLOCK128:
            part = tl.zeros((SPLIT, height, TOKENS), tl.float32)
            part = run_sums(
                low, scale, x, token * (x_stride // 2), x_word, x_mask, part, CODES, SCALES, WORD, COLUMNS, EXACT
            )  # fmt: skip
            total += part * run_scales(
                blocks, slot, panel, run, row, inside & (run * RUN < WORDS),
                SCALES, COLUMNS, CODES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
            )  # fmt: skip
        else:
            total = run_sums(
                low, scale, x, token * (x_stride // 2), x_word, x_mask, total, CODES, SCALES, WORD, COLUMNS, EXACT
            )  # fmt: skip
    sums = tl.sum(total, 0)
    if SCALES == ROW or SCALES == GROUP16:  # noqa: SIM109
        line = tl.arange(0, height)[:, None]
        own, within = group * (2 * PANELS) + line // ROWS, line % ROWS
        sums *= load_row_scales(
            blocks, slot, own, within, own < 2 * ((INTERMEDIATE + ROWS - 1) // ROWS),
            SCALES, COLUMNS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
        )  # fmt: skip
    pairs = tl.permute(tl.reshape(sums, (PANELS, 2, ROWS, TOKENS)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    act = tl.reshape(swiglu(gate, up), (PANELS * ROWS, TOKENS))
    at = group * (PANELS * ROWS) + tl.arange(0, PANELS * ROWS)[:, None]
    t = tl.arange(0, TOKENS)[None, :]
    place = scratch + (u * expert_stride + t * token_stride + at)
    tl.store(place, act.to(scratch.dtype.element_ty), (at < INTERMEDIATE) & (t < tokens))


@triton.jit
def down_dots(
    scratch, expert_stride, token_stride, tokens, blocks, count, slots, combine, combine_stride, out, out_stride,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr, PANELS: tl.constexpr, PDL: tl.constexpr,
    EXACT: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """PANELS panels' rows of all experts a program: the runs of the experts one after the other, SPLIT at a time."""
    group = tl.program_id(0)
    height: tl.constexpr = PANELS * ROWS
    r = tl.arange(0, height)[None, :, None]
    panel, row = group * PANELS + r // ROWS, r % ROWS
    inside = panel < (HIDDEN + ROWS - 1) // ROWS
    token = tl.arange(0, TOKENS)[None, None, :]
    expert_runs: tl.constexpr = (WORDS + RUN - 1) // RUN
    wait_for_previous(PDL)
    start_next(PDL)
    runs = tl.load(count) * expert_runs
    total = tl.zeros((SPLIT, height, TOKENS), tl.float32)
    for first in range(0, bound(runs), SPLIT):
        at = first + tl.arange(0, SPLIT)[:, None, None]
        u, run = at // expert_runs, at % expert_runs
        known = at < runs
        slot = tl.load(slots + u, known, 0)
        word, x_word = run * RUN + tl.arange(0, RUN)[None, None, :], run * RUN + tl.arange(0, RUN)[None, :, None]
        mask = known & inside & (word < WORDS)
        low, _ = load_words(blocks, slot, panel, word, row, mask, CODES, SLOT_BYTES, BASE, PANEL_BYTES)
        scale = code_scales(
            blocks, slot, panel, word, row, mask,
            CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES, EXACT,
        )  # fmt: skip
        weight = tl.load(combine + (u * combine_stride + token), known & (token < tokens), 0.0)
        part = tl.zeros((SPLIT, height, TOKENS), tl.float32)
        part = run_sums(
            low, scale, scratch, u * (expert_stride // 2) + token * (token_stride // 2), x_word,
            (weight != 0.0) & (x_word < WORDS), part, CODES, SCALES, WORD, COLUMNS, EXACT,
        )  # fmt: skip
        factor = run_scales(
            blocks, slot, panel, run, row, known & inside & (run * RUN < WORDS),
            SCALES, COLUMNS, CODES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
        )  # fmt: skip
        total += part * (weight * factor)
    sums = tl.sum(total, 0)
    n, t = group * height + tl.arange(0, height)[:, None], tl.arange(0, TOKENS)[None, :]
    place, mask = out + (t * out_stride + n), (n < HIDDEN) & (t < tokens)
    tl.store(place, tl.load(place, mask, 0.0) + sums, mask)
