"""Reading tiles of packed panels (formats/format.py has the order) in Triton, any format.

A word is the 32 bits that hold the next columns of one row: 8, 4, 2 of them by 4, 8, 16 bits. Words lie
[word][16 rows], so a tile of words is read along its rows, 16 bytes a thread, and is cut into pairs of columns in
registers: pair j of a word are its columns 2j and 2j + 1, the j-th parts of its low and high half. 32-bit codes take
two words for a pair.

E2M1 and E4M3 codes become numbers by shifts alone: sign, exponent and mantissa move to where a wider float has them.
What comes out is too small by a power of two (the biases' difference), which activations or scales make good: codes are
as if multiplied by 2 ** -126 and 2 ** -120. E4M3's NaN reads as 480, E8M0's as infinity.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ftengine.formats.format import Codes, Format, ScaleKind, padded

CODES = {kind: number for number, kind in enumerate(Codes)}
SCALES = {kind: number for number, kind in enumerate(ScaleKind)}

FLOAT32 = tl.constexpr(CODES[Codes.FLOAT32])
FLOAT16 = tl.constexpr(CODES[Codes.FLOAT16])
BFLOAT16 = tl.constexpr(CODES[Codes.BFLOAT16])
E4M3 = tl.constexpr(CODES[Codes.E4M3])
E2M1 = tl.constexpr(CODES[Codes.E2M1])
INT8 = tl.constexpr(CODES[Codes.INT8])
INT4 = tl.constexpr(CODES[Codes.INT4])
NONE = tl.constexpr(SCALES[ScaleKind.NONE])
ROW = tl.constexpr(SCALES[ScaleKind.ROW])
BLOCK128 = tl.constexpr(SCALES[ScaleKind.BLOCK128])
GROUP16 = tl.constexpr(SCALES[ScaleKind.GROUP16])
MX32 = tl.constexpr(SCALES[ScaleKind.MX32])
HALF32 = tl.constexpr(SCALES[ScaleKind.HALF32])

ROWS = tl.constexpr(16)
LIFT = tl.constexpr(2.0**62)  # of activations before they meet E2M1 and E4M3 codes: no product is subnormal


def geometry(format: Format, columns: int, base: int, slot_bytes: int) -> dict[str, Any]:
    """The constants by which kernels find a matrix of `columns` columns that starts `base` bytes into a block."""
    word = 32 // format.bits if format.bits < 32 else 2
    return {
        "CODES": CODES[format.codes],
        "SCALES": SCALES[format.scales],
        "COLUMNS": columns,
        "WORD": word,
        "WORDS": padded(columns) // word,
        "SLOT_BYTES": slot_bytes,
        "BASE": base,
        "PANEL_BYTES": format.panel_bytes(columns),
        "CODE_BYTES": format.code_bytes(columns),
    }


@triton.jit
def place(slot, panel, UNIT: tl.constexpr, SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr):
    """Where a panel starts in the blocks, int64, in units of UNIT bytes."""
    return slot.to(tl.int64) * (SLOT_BYTES // UNIT) + (BASE // UNIT + panel * (PANEL_BYTES // UNIT))


@triton.jit
def load_pair(x, row, pair, mask, CODES: tl.constexpr):
    """Two neighbouring activations as float32, lifted where the codes need it. row: in elements, even."""
    if x.dtype.element_ty == tl.float32:
        even, odd = tl.load(x + (row + 2 * pair), mask, 0.0), tl.load(x + (row + 2 * pair + 1), mask, 0.0)
    else:
        both = tl.load(x.to(tl.pointer_type(tl.uint32)) + (row // 2 + pair), mask, 0)
        even, odd = halves(both, True)
    if CODES == E2M1 or CODES == E4M3:  # noqa: SIM109
        even, odd = even * LIFT, odd * LIFT
    return even, odd


@triton.jit
def lowered(total, CODES: tl.constexpr):
    """Sums of lifted activations times codes as they are meant."""
    if CODES == E2M1:
        total *= 2.0**64
    elif CODES == E4M3:
        total *= 2.0**58
    return total


@triton.jit
def load_words(
    blocks, slot, panel, word, row, mask,
    CODES: tl.constexpr, SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr,
):  # fmt: skip
    """uint32 words, twice: with 32-bit codes the second ones are the odd columns. slot .. mask broadcast together."""
    at = place(slot, panel, 4, SLOT_BYTES, BASE, PANEL_BYTES)
    words = blocks.to(tl.pointer_type(tl.uint32))
    if CODES == FLOAT32:
        at = at + (word * ROWS + row) * 2
        return tl.load(words + at, mask, 0), tl.load(words + at + 1, mask, 0)
    else:
        low = tl.load(words + (at + (word * ROWS + row)), mask, 0)
        return low, low


@triton.jit
def load_scales(
    blocks, slot, panel, word, row, mask,
    CODES: tl.constexpr, SCALES: tl.constexpr, WORD: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """The scales of words as they are stored, not of whole rows: bytes, halves or floats. Not for NONE and ROW."""
    if SCALES == BLOCK128:
        at = place(slot, panel, 4, SLOT_BYTES, BASE, PANEL_BYTES) + (CODE_BYTES // 4 + word // (128 // WORD))
        return tl.load(blocks.to(tl.pointer_type(tl.float32)) + at, mask, 0.0)
    elif SCALES == HALF32:
        at = place(slot, panel, 2, SLOT_BYTES, BASE, PANEL_BYTES) + CODE_BYTES // 2
        return tl.load(blocks.to(tl.pointer_type(tl.float16)) + (at + (word // (32 // WORD) * ROWS + row)), mask, 0.0)
    else:
        group: tl.constexpr = 16 // WORD if SCALES == GROUP16 else 32 // WORD
        at = place(slot, panel, 1, SLOT_BYTES, BASE, PANEL_BYTES) + CODE_BYTES
        pointers = blocks + (at + (word // group * ROWS + row))
        # A thread has as many rows of these as of words: told of 16 bytes in a row, Triton would give it 16 rows.
        if len(pointers.shape) == 2:
            pointers = tl.max_contiguous(pointers, (1, 4))
        else:
            pointers = tl.max_contiguous(pointers, (1, 4, 1))
        return tl.load(pointers, mask, 0)


@triton.jit
def load_row_scales(
    blocks, slot, panel, row, mask, SCALES: tl.constexpr, COLUMNS: tl.constexpr,
    SLOT_BYTES: tl.constexpr, BASE: tl.constexpr, PANEL_BYTES: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """float32 scales of whole rows. Only for ROW and GROUP16."""
    groups: tl.constexpr = (COLUMNS + 31) // 32 * 2 * ROWS if SCALES == GROUP16 else 0
    at = place(slot, panel, 4, SLOT_BYTES, BASE, PANEL_BYTES) + ((CODE_BYTES + groups) // 4)
    return tl.load(blocks.to(tl.pointer_type(tl.float32)) + (at + row), mask, 0.0)


@triton.jit
def scale_numbers(stored, SCALES: tl.constexpr):
    """float32 of what `load_scales` gives, exactly."""
    if SCALES == GROUP16:  # e4m3
        bits = stored.to(tl.uint32)
        return (((bits << 24) & 0x80000000) | ((bits << 20) & 0x07F00000)).to(tl.float32, bitcast=True) * 2.0**120
    elif SCALES == MX32:  # 2 ** (byte - 127), which is subnormal for 0
        bits = stored.to(tl.uint32)
        return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def column_pair(low, high, J: tl.constexpr, CODES: tl.constexpr):
    """Columns 2J and 2J + 1 of words as float32; E2M1 and E4M3 too small, see above."""
    if CODES == FLOAT32:
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    elif CODES == BFLOAT16:
        return halves(low, True)
    elif CODES == FLOAT16:
        even, odd = (low & 0xFFFF).to(tl.uint16), (low >> 16).to(tl.uint16)
        return even.to(tl.float16, bitcast=True).to(tl.float32), odd.to(tl.float16, bitcast=True).to(tl.float32)
    elif CODES == E4M3:
        # The shift to the right copies the sign, of which the mask keeps the outermost.
        even, odd = (low << (24 - 8 * J)).to(tl.int32, bitcast=True), (low << (8 - 8 * J)).to(tl.int32, bitcast=True)
        even, odd = (even >> 4) & -0x78100000, (odd >> 4) & -0x78100000
        return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
    elif CODES == E2M1:
        even, odd = (low << (28 - 4 * J)).to(tl.int32, bitcast=True), (low << (12 - 4 * J)).to(tl.int32, bitcast=True)
        even, odd = (even >> 6) & -0x7E400000, (odd >> 6) & -0x7E400000
        return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
    elif CODES == INT8:
        even, odd = (low << (24 - 8 * J)).to(tl.int32, bitcast=True), (low << (8 - 8 * J)).to(tl.int32, bitcast=True)
        return (even >> 24).to(tl.float32), (odd >> 24).to(tl.float32)
    else:
        even, odd = (low >> (4 * J)) & 15, (low >> (16 + 4 * J)) & 15
        return even.to(tl.float32) - 8.0, odd.to(tl.float32) - 8.0


@triton.jit
def bfloat16_words(low, J: tl.constexpr, CODES: tl.constexpr):
    """The same two columns in 32 bits, the even one low, as bfloat16; for BFLOAT16, E4M3 and E2M1."""
    if CODES == E4M3:
        low = low << (8 - 8 * J)
        return (low & 0x80008000) | ((low >> 4) & 0x07F007F0)
    elif CODES == E2M1:
        low = low << (12 - 4 * J)
        return (low & 0x80008000) | ((low >> 6) & 0x01C001C0)
    else:
        return low


@triton.jit
def halves(words, EXACT: tl.constexpr):
    """The low and the high bfloat16 of 32 bits; EXACT: as float32."""
    if EXACT:
        return (words << 16).to(tl.float32, bitcast=True), (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low, high = (words & 0xFFFF).to(tl.uint16), (words >> 16).to(tl.uint16)
        return low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, without an exponential that overflows."""
    small = tl.exp(-tl.abs(gate))
    return gate * tl.where(gate < 0.0, small, 1.0) / (1.0 + small) * up
