"""Writing a safetensors file of BF16 tensors one at a time, so that no more than one is in memory.

The library's own writer takes all tensors at once, and numpy has no bfloat16.
Format: https://huggingface.co/docs/safetensors, 8 bytes little-endian header length, a JSON header padded with spaces
to 8 bytes, then the data. Every machine that ft runs on is little-endian, as the format is.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Shapes = dict[str, tuple[int, ...]]


def write_bf16(path: Path, shapes: Shapes, tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> Iterator[int]:
    """Write `tensors`, which come in the order of `shapes`. Yields the bytes written after each.

    Raises ValueError when a tensor is not the one that the header announces.
    """
    header, start = {}, 0
    for name, shape in shapes.items():
        end = start + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        written = file.write(struct.pack("<Q", len(text)) + text)
        expected = iter(shapes.items())
        for name, tensor in tensors:
            if next(expected, None) != (name, tensor.shape):
                raise ValueError(f"{name} {tensor.shape} is not the tensor that comes next")
            written += file.write(to_bf16(tensor).data)
            yield written
        if next(expected, None) is not None:
            raise ValueError("tensors are missing")


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of the float32 bit patterns, rounded to nearest, ties to even. Finite values only."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    import numpy as np

    return (bits.astype(np.uint32) << 16).view(np.float32)
