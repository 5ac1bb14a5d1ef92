"""How fast the CPU's kernels are where nothing waits for memory: of matrices in caches, in a tenth of a second.

Vectors of 256 bits take longer to unpack FP4 weights than many a machine takes to read them, and how long differs
between processors that all have AVX2 by more than a prediction may be off.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ftengine.formats.format import BF16, NVFP4, Format
from ftengine.kernels import native

ROWS, COLUMNS = 256, 2048  # of one thread's part: 0.3 MB in FP4
PROMPT = 32  # rows of activations, as an expert gets them of a prompt
SECONDS, PASSES = 0.04, 3  # of one kind of product, at the least
WHOLE = 0.8  # of that in a whole prompt: attention, routing, and rows that no tile is full of


@dataclass(frozen=True)
class KernelRate:
    """Of so many threads together. bytes: of FP4 weights that one row is multiplied with, a second; products: a second
    of a whole prompt.
    """

    bytes: float
    products: float


def measured(threads: int, isa: str) -> KernelRate | None:
    """None without the native library, or where this processor lacks that version of the kernels."""
    if not native.AVAILABLE or isa not in native.instruction_sets():
        return None
    rows = ROWS * threads
    one = _seconds(NVFP4, 1, rows, threads, isa)
    many = _seconds(BF16, PROMPT, rows, threads, isa)
    return KernelRate(NVFP4.matrix_bytes(rows, COLUMNS) / one, WHOLE * PROMPT * rows * COLUMNS / many)


def _seconds(kind: Format, tokens: int, rows: int, threads: int, isa: str) -> float:
    """The shortest pass: what others take of it only ever makes it longer. Of zeros, whose product takes no less."""
    import numpy

    from ftengine import _native

    weights = numpy.zeros(kind.matrix_bytes(rows, COLUMNS), numpy.uint8)
    x, out = numpy.zeros((tokens, COLUMNS), numpy.float32), numpy.zeros((tokens, rows), numpy.float32)
    best, passes, end = float("inf"), 0, time.perf_counter() + SECONDS
    while passes < PASSES or time.perf_counter() < end:
        begin = time.perf_counter()
        _native.linear_packed(x, weights, rows, COLUMNS, kind.number, out, threads=threads, isa=isa)
        best, passes = min(best, time.perf_counter() - begin), passes + 1
    return best
