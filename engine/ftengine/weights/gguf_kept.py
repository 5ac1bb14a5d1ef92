"""Which of GGUF's types our formats hold code by code, and what becomes of the others. Torch-free."""

from __future__ import annotations

from ftengine.formats.format import BF16, F16, F32, MXFP4, NVFP4, Q4_0, Q8_0, Format
from ftengine.weights.gguf_layout import Part

GROUP = {"Q8_0": 32, "Q4_0": 32, "MXFP4": 32, "NVFP4": 16}  # values that share a scale
KEPT = {"F32": F32, "F16": F16, "BF16": BF16, "Q8_0": Q8_0, "Q4_0": Q4_0, "MXFP4": MXFP4, "NVFP4": NVFP4}
OTHERWISE = BF16  # types that no format of ours holds: their own error is many times what this rounding adds


def format_of(part: Part) -> Format:
    """That a tensor has once it is read."""
    return KEPT[part.tensor.type.name] if is_kept(part) else OTHERWISE


def is_kept(part: Part) -> bool:
    """Whether the file's own codes are: not where columns that share a scale would be torn apart, nor where a second
    scale has no place in the format.
    """
    kind = part.tensor.type.name
    torn = part.column_order is not None and part.column_order.size % GROUP.get(kind, 1) != 0
    return kind in KEPT and not torn and (part.scale is None or kind == "NVFP4")
