"""The header of a safetensors file, checked as untrusted input before a byte of data is used.

Format: https://github.com/huggingface/safetensors#format - 8 bytes little-endian header length, a JSON header,
then the data, which the tensors cover without gap or overlap. Torch-free.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftengine.errors import CheckpointError
from ftengine.weights.files import open_regular

# The format allows 100 MB; sixty thousand tensors need nine, and a parsed header takes many times its size.
MAX_HEADER_BYTES = 32 << 20
MAX_NAME_LENGTH = 512
MAX_RANK = 8
MAX_DIMENSION = 1 << 48

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. `start` and `end` are byte offsets in `file`, header included."""

    name: str
    dtype: str  # the format's own name: "BF16", "F32"
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file by name. Raises CheckpointError for anything the format forbids."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _damaged(path, "it is shorter than 8 bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise _damaged(path, f"its header claims {length} bytes, {MAX_HEADER_BYTES} are allowed")
        if length > size - 8:
            raise _damaged(path, f"its header claims {length} bytes, the file has {size}")
        raw = file.read(length)
    if len(raw) < length:
        raise _damaged(path, "it ends inside the header")
    entries = [_entry(path, name, value, 8 + length) for name, value in _parse(path, raw).items()]
    _check_coverage(path, entries, 8 + length, size)
    return {entry.name: entry for entry in entries}


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a sound safetensors file: {reason}")


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise _damaged(path, "its header does not start with '{'")
    try:
        header = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_int=_bounded_int, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid JSON ({error})") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its __metadata__ is not a map of strings")
    return dict(header)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key appears twice")
    return result


def _bounded_int(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("a number has more than 20 digits")
    return int(digits)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise _damaged(path, f"the tensor name {name[:64]!r} is not acceptable")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"the entry of {name} does not consist of dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _damaged(path, f"{name} has the unknown dtype {str(dtype)[:32]!r}")
    if not _integers(shape) or len(shape) > MAX_RANK or any(not 0 <= extent <= MAX_DIMENSION for extent in shape):
        raise _damaged(path, f"{name} has an impossible shape")
    if not _integers(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise _damaged(path, f"{name} has impossible data_offsets")
    elements = 1
    for extent in shape:
        elements *= extent
    if elements * bits != (offsets[1] - offsets[0]) * 8:
        raise _damaged(path, f"{name} takes {offsets[1] - offsets[0]} bytes, which {dtype} {shape} does not")
    return TensorEntry(name, str(dtype), tuple(shape), path, data_start + offsets[0], data_start + offsets[1])


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_coverage(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    position = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start < position:
            raise _damaged(path, f"{entry.name} overlaps another tensor")
        if entry.start > position:
            raise _damaged(path, f"there is a gap before {entry.name}")
        position = entry.end
    if position > size:
        raise _damaged(path, f"its tensors need {position} bytes, the file has {size}")
    if position < size:
        raise _damaged(path, f"{size - position} bytes follow its last tensor")
