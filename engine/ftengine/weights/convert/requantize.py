"""A matrix in another number format, and how far that is from what it was."""

from __future__ import annotations

from ftengine.formats.dequantize import dequantize
from ftengine.formats.format import Format
from ftengine.formats.matrix import QuantMatrix
from ftengine.formats.quantize import quantize
from ftengine.weights.convert.losses import Deviation

# Of a large matrix that is converted at once. 64 panels, so that what is written ends at a multiple of 4096 bytes; and
# what one second scale of NVFP4 covers.
BLOCK_ROWS = 1024


def requantized(matrix: QuantMatrix, form: Format, name: str, deviation: Deviation | None = None) -> QuantMatrix:
    """The matrix itself if it has the format already. Raises CheckpointError for NaN and infinity."""
    if matrix.format is form:
        return matrix
    before = dequantize(matrix)
    after = quantize(before, form, name)
    if deviation is not None:
        deviation.add(before, dequantize(after))
    return after
