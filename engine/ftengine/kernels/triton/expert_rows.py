"""Experts of a decode step by multiply and add in float32, a token at a time: any format, any activations.

The fastest way for one token, where the matrix units would compute fifteen sixteenths for nothing, and the exact one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftengine.kernels.triton.expert_tiles import (
    GROUP16,
    NONE,
    ROW,
    ROWS,
    column_pair,
    load_pair,
    load_row_scales,
    load_scales,
    load_words,
    lowered,
    scale_numbers,
    swiglu,
)
from ftengine.kernels.triton.expert_turns import its_turn
from ftengine.kernels.triton.launch import start_next, wait_for_previous
from ftengine.kernels.triton.portable import bound


@triton.jit
def word_sums(
    low, high, x, row, word, mask, CODES: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Each word's codes times the activations of its columns: float32, the shape of the words."""
    total = tl.zeros(low.shape, tl.float32)
    for j in tl.static_range(WORD // 2):
        pair = word * (WORD // 2) + j
        known = mask
        if WORDS * WORD != COLUMNS:
            known = mask & (pair < COLUMNS // 2)
        even_x, odd_x = load_pair(x, row, pair, known, CODES)
        even, odd = column_pair(low, high, j, CODES)
        total += even * even_x
        total += odd * odd_x
    return total


@triton.jit
def gate_up_rows(
    x, x_stride, blocks, count, slots, turn, ready, combine, combine_stride, scratch, expert_stride, token_stride,
    TOKENS: tl.constexpr, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """One pair of panels of one expert a program, BLOCK words of their rows at a time."""
    pair = tl.program_id(0)
    u, slot, there = its_turn(tl.program_id(1), count, slots, turn, ready, EARLY, PDL)
    if not there:
        return
    line, rows = tl.arange(0, BLOCK)[:, None], tl.arange(0, 2 * ROWS)
    panel, row = (2 * pair + rows // ROWS)[None, :], (rows % ROWS)[None, :]
    for token in range(TOKENS):
        if TOKENS == 1 or tl.load(combine + u * combine_stride + token) != 0.0:
            total = tl.zeros((BLOCK, 2 * ROWS), tl.float32)
            for first in range(0, WORDS, BLOCK):
                word = first + line
                mask = tl.full((BLOCK, 1), True, tl.int1) if WORDS % BLOCK == 0 else word < WORDS
                low, high = load_words(
                    blocks, slot, panel, word, row, mask, CODES, SLOT_BYTES, BASE, PANEL_BYTES
                )  # fmt: skip
                scale = word_scales(
                    blocks, slot, panel, word, row, mask,
                    CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
                )  # fmt: skip
                tl.debug_barrier()  # no load may sink below it: all of them are on their way at once
                part = word_sums(low, high, x, token * x_stride, word, mask, CODES, WORD, WORDS, COLUMNS)
                total += part * scale
            sums = lowered(tl.sum(total, 0), CODES)
            if SCALES == ROW or SCALES == GROUP16:  # noqa: SIM109
                sums *= load_row_scales(
                    blocks, slot, 2 * pair + rows // ROWS, rows % ROWS, rows >= 0,
                    SCALES, COLUMNS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
                )  # fmt: skip
            gate, up = tl.split(tl.trans(tl.reshape(sums, (2, ROWS))))
            act = swiglu(gate, up)
            at = pair * ROWS + tl.arange(0, ROWS)
            tl.store(scratch + (u * expert_stride + token * token_stride + at), act, at < INTERMEDIATE)


@triton.jit
def word_scales(
    blocks, slot, panel, word, row, mask, CODES: tl.constexpr, SCALES: tl.constexpr, WORD: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """float32 scales of words; 1 where there are only those of whole rows, or none."""
    if SCALES == NONE or SCALES == ROW:  # noqa: SIM109
        return 1.0
    else:
        stored = load_scales(
            blocks, slot, panel, word, row, mask,
            CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
        )  # fmt: skip
        return scale_numbers(stored, SCALES)


@triton.jit
def down_rows(
    scratch, expert_stride, token_stride, blocks, count, slots, combine, combine_stride, out, out_stride,
    TOKENS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """One panel's rows of all experts a program: the experts' words one after the other, BLOCK of them at a time."""
    panel = tl.program_id(0)
    line, rows = tl.arange(0, BLOCK)[:, None], tl.arange(0, ROWS)
    row = rows[None, :]
    # Blocks and routes are there before gate_up lets this kernel start (expert_turns.py).
    lines = tl.load(count) * WORDS
    low, high, scale = _load_lines(
        line, lines, panel, row, blocks, slots,
        CODES, SCALES, COLUMNS, WORD, WORDS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
    )  # fmt: skip
    wait_for_previous(PDL)
    start_next(PDL)
    for token in range(TOKENS):
        total = tl.zeros((BLOCK, ROWS), tl.float32)
        for first in range(0, bound(lines), BLOCK):
            at = first + line
            if first > 0 or token > 0:
                low, high, scale = _load_lines(
                    at, lines, panel, row, blocks, slots,
                    CODES, SCALES, COLUMNS, WORD, WORDS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
                )  # fmt: skip
            u, word = at // WORDS, at % WORDS
            weight = tl.load(combine + (u * combine_stride + token), at < lines, 0.0)
            act = u * expert_stride + token * token_stride
            part = word_sums(low, high, scratch, act, word, weight != 0.0, CODES, WORD, WORDS, COLUMNS)
            total += part * (scale * weight)
        numbers = lowered(tl.sum(total, 0), CODES)
        n = panel * ROWS + rows
        place = out + token * out_stride + n
        tl.store(place, tl.load(place, n < HIDDEN, 0.0) + numbers, n < HIDDEN)


@triton.jit
def down_parts(
    scratch, expert_stride, token_stride, blocks, count, slots, combine, combine_stride, parts,
    TOKENS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PANELS: tl.constexpr, PDL: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """parts[u, t] = combine[u, t] * down scratch[u, t] where a token uses an expert. PANELS of one expert a program."""
    group, u = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    start_next(PDL)
    slot, used = tl.load(slots + u), tl.load(count)
    if (u >= used) | (slot < 0):
        return
    line, rows = tl.arange(0, BLOCK)[:, None], tl.arange(0, PANELS * ROWS)
    n = group * (PANELS * ROWS) + rows
    panel, row, inside = (n // ROWS)[None, :], (n % ROWS)[None, :], (n < HIDDEN)[None, :]
    for token in range(TOKENS):
        weight = tl.load(combine + u * combine_stride + token)
        if weight != 0.0:
            total = tl.zeros((BLOCK, PANELS * ROWS), tl.float32)
            for first in range(0, WORDS, BLOCK):
                word = first + line
                known = word < WORDS
                mask = known & inside
                low, high = load_words(
                    blocks, slot, panel, word, row, mask, CODES, SLOT_BYTES, BASE, PANEL_BYTES
                )  # fmt: skip
                scale = word_scales(
                    blocks, slot, panel, word, row, mask,
                    CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
                )  # fmt: skip
                tl.debug_barrier()  # no load may sink below it
                act = u * expert_stride + token * token_stride
                total += word_sums(low, high, scratch, act, word, known, CODES, WORD, WORDS, COLUMNS) * scale
            sums = lowered(tl.sum(total, 0), CODES)
            if SCALES == ROW or SCALES == GROUP16:  # noqa: SIM109
                sums *= load_row_scales(
                    blocks, slot, n // ROWS, n % ROWS, n < HIDDEN,
                    SCALES, COLUMNS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
                )  # fmt: skip
            tl.store(parts + ((u * TOKENS + token) * HIDDEN + n), sums * weight, n < HIDDEN)


@triton.jit
def add_parts(
    parts, count, combine, combine_stride, out, out_stride,
    TOKENS: tl.constexpr, HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] += the sum of parts[u, t] over the experts that a token uses. EXPERTS: all that there may be."""
    token, n = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    u = tl.arange(0, EXPERTS)
    wait_for_previous(PDL)
    start_next(PDL)
    weight = tl.load(combine + (u * combine_stride + token), u < tl.load(count), 0.0)
    at = (u * TOKENS + token)[:, None] * HIDDEN + n[None, :]
    part = tl.load(parts + at, (weight != 0.0)[:, None] & (n < HIDDEN)[None, :], 0.0)
    place = out + token * out_stride + n
    tl.store(place, tl.load(place, n < HIDDEN, 0.0) + tl.sum(part, 0), n < HIDDEN)


@triton.jit
def _load_lines(
    line, lines, panel, row, blocks, slots,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """Words and all their scales; line: number of the word among those of all experts."""
    mask = line < lines
    word = line % WORDS
    slot = tl.load(slots + line // WORDS, mask, 0)
    low, high = load_words(blocks, slot, panel, word, row, mask, CODES, SLOT_BYTES, BASE, PANEL_BYTES)
    scale = word_scales(
        blocks, slot, panel, word, row, mask,
        CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
    )  # fmt: skip
    if SCALES == ROW or SCALES == GROUP16:  # noqa: SIM109
        scale *= load_row_scales(
            blocks, slot, panel, row, mask, SCALES, COLUMNS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES
        )
    return low, high, tl.zeros(low.shape, tl.float32) + scale
