"""The kernels of `experts_grouped`. A product is [HEIGHT weight rows] x [BLOCK routes], WIDTH words of a row a step.

Activations lie spread, [WORD][words] instead of columns in turn: what multiplies the c-th column of neighbouring words
is side by side. Those for E2M1 and E4M3 codes lie lifted (expert_tiles.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftengine.kernels.triton.expert_dots import code_scales
from ftengine.kernels.triton.expert_rows import word_scales
from ftengine.kernels.triton.expert_tiles import (
    BFLOAT16,
    BLOCK128,
    E2M1,
    E4M3,
    GROUP16,
    LIFT,
    ROW,
    ROWS,
    bfloat16_words,
    column_pair,
    halves,
    load_row_scales,
    load_scales,
    load_words,
    swiglu,
)
from ftengine.kernels.triton.portable import bound, dot


@triton.jit
def spread_columns(
    x, x_stride, out, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr, CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t, c, word] = x[t, word * WORD + c], lifted where the codes need it, zeros beyond COLUMNS."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = (at % WORDS) * WORD + at // WORDS
    value = tl.load(x + (token * x_stride + column), (at < WORD * WORDS) & (column < COLUMNS), 0.0)
    tl.store(out + (token * (WORD * WORDS) + at), lifted(value, CODES), at < WORD * WORDS)


@triton.jit
def lifted(value, CODES: tl.constexpr):
    if CODES == E2M1 or CODES == E4M3:  # noqa: SIM109
        return value.to(tl.float32) * LIFT
    else:
        return value


@triton.jit
def tile_sums(
    blocks, slot, panel, row, inside, x, line, known,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """float32 [HEIGHT, BLOCK]: weight rows times activations. panel, row, inside: [HEIGHT, 1]; line, the rows of x, and
    known: [1, BLOCK]."""
    total = tl.zeros((HEIGHT, BLOCK), tl.float32)
    for first in tl.range(0, WORDS, WIDTH):
        word, x_word = first + tl.arange(0, WIDTH)[None, :], first + tl.arange(0, WIDTH)[:, None]
        mask, x_mask = inside & (word < WORDS), known & (x_word < WORDS)
        low, high = load_words(blocks, slot, panel, word, row, mask, CODES, SLOT_BYTES, BASE, PANEL_BYTES)
        # Where the matrix units multiply 16 bits, only scales that keep codes exact go on them.
        if SHORT:
            scale = code_scales(
                blocks, slot, panel, word, row, mask,
                CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES, EXACT,
            )  # fmt: skip
        else:
            scale = word_scales(
                blocks, slot, panel, word, row, mask,
                CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
            )  # fmt: skip
        part = tl.zeros((HEIGHT, BLOCK), tl.float32) if SCALES == BLOCK128 else total
        for j in tl.static_range(WORD // 2):
            pointers = x + (line * (WORD * WORDS) + (2 * j) * WORDS + x_word)
            even_x, odd_x = tl.load(pointers, x_mask, 0.0), tl.load(pointers + WORDS, x_mask, 0.0)
            if EXACT:
                even_x, odd_x = even_x.to(tl.float32), odd_x.to(tl.float32)
            if SHORT:
                even, odd = halves(bfloat16_words(low, j, CODES), EXACT)
                if CODES != BFLOAT16:
                    even, odd = (even * scale).to(even.dtype), (odd * scale).to(odd.dtype)
            else:
                even, odd = column_pair(low, high, j, CODES)
                even, odd = even * scale, odd * scale
            part = dot(even, even_x, part, EXACT)
            part = dot(odd, odd_x, part, EXACT)
        if SCALES == BLOCK128:
            total += part * load_scales(
                blocks, slot, panel, tl.full((1, 1), 0, tl.int32) + first, row, inside,
                CODES, SCALES, WORD, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
            )  # fmt: skip
        else:
            total = part
    if SCALES == ROW or SCALES == GROUP16:  # noqa: SIM109
        total *= load_row_scales(
            blocks, slot, panel, row, inside, SCALES, COLUMNS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES
        )
    return total


@triton.jit(do_not_specialize=["route_count"])
def gate_up_tiles(
    x, blocks, routes, slots, first, count, act, route_count, programs,
    TOP_K: tl.constexpr, INTERMEDIATE: tl.constexpr, PANELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    DOWN_WORD: tl.constexpr, DOWN_WORDS: tl.constexpr, DOWN_CODES: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SHORT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """act[place, spread for down] = silu(gate x) * up x, by place in the order of routes."""
    line = tl.arange(0, HEIGHT)[:, None]
    for item in range(bound(tl.program_id(0)), bound(tl.load(count) * GROUPS), bound(programs)):
        start, group = tl.load(first + item // GROUPS), item % GROUPS
        slot = tl.load(slots + start)
        place = start + tl.arange(0, BLOCK)[None, :]
        known = (place < route_count) & (tl.load(slots + place, place < route_count, -1) == slot)
        token = (tl.load(routes + place, known, 0) // TOP_K).to(tl.int64)
        panel, row = group * (HEIGHT // ROWS) + line // ROWS, line % ROWS
        total = tile_sums(
            blocks, slot, panel, row, panel < PANELS, x, token, known,
            CODES, SCALES, COLUMNS, WORD, WORDS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
            HEIGHT, WIDTH, BLOCK, SHORT, EXACT,
        )  # fmt: skip
        pairs = tl.permute(tl.reshape(total, (HEIGHT // (2 * ROWS), 2, ROWS, BLOCK)), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        result = tl.reshape(swiglu(gate, up), (HEIGHT // 2, BLOCK))
        column = group * (HEIGHT // 2) + tl.arange(0, HEIGHT // 2)[:, None]
        at = column % DOWN_WORD * DOWN_WORDS + column // DOWN_WORD
        target = act + (place.to(tl.int64) * (DOWN_WORD * DOWN_WORDS) + at)
        # Rounded before it is lifted, so that lifting is exact.
        result = lifted(result.to(act.dtype.element_ty), DOWN_CODES)
        tl.store(target, result, known & (column < INTERMEDIATE))


@triton.jit(do_not_specialize=["route_count"])
def down_tiles(
    act, blocks, routes, slots, first, count, results, route_count, programs, from_row, row_count,
    PART: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SHORT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """results[route] = rows [from_row, from_row + row_count) of down times act[place of the route]."""
    line = tl.arange(0, HEIGHT)[:, None]
    for item in range(bound(tl.program_id(0)), bound(tl.load(count) * GROUPS), bound(programs)):
        start, group = tl.load(first + item // GROUPS), item % GROUPS
        slot = tl.load(slots + start)
        place = start + tl.arange(0, BLOCK)[None, :]
        known = (place < route_count) & (tl.load(slots + place, place < route_count, -1) == slot)
        n = group * HEIGHT + line
        total = tile_sums(
            blocks, slot, (from_row + n) // ROWS, n % ROWS, n < row_count, act, place.to(tl.int64), known,
            CODES, SCALES, COLUMNS, WORD, WORDS, SLOT_BYTES, BASE, PANEL_BYTES, CODE_BYTES,
            HEIGHT, WIDTH, BLOCK, SHORT, EXACT,
        )  # fmt: skip
        route = tl.load(routes + place, known, 0).to(tl.int64)
        tl.store(results + (route * PART + n), total.to(results.dtype.element_ty), known & (n < row_count))


@triton.jit
def add_routes(
    results, skipped, weights, out, first, hidden, TOP_K: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t, first ..] += the weighted results of a token's routes."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (at < PART) & (first + at < hidden)
    place = out + (token * hidden + first + at)
    total = tl.load(place, mask, 0.0)
    for i in range(TOP_K):
        route = token * TOP_K + i
        here = tl.load(skipped + route) == 0
        result = tl.load(results + (route * PART + at), mask & here, 0.0).to(tl.float32)
        total += result * tl.load(weights + route)
    tl.store(place, total, mask)
