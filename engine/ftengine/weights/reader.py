"""Reads parts of tensors from disk straight into their place in host memory. Safe to use from several threads.

Plain positioned reads, not a memory map: a file that shrinks while it is read gives a CheckpointError here, and
would end the process with SIGBUS there; and a conversion never holds more than one staging block.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

import torch

from ftengine.errors import CheckpointError
from ftengine.weights.header import TensorEntry
from ftengine.weights.ranges import Bytes, RangeFile

STAGING_BYTES = 16 << 20
# Codes and scales of small formats are handled as bytes.
DISK_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
}


class FilesOfTensors:
    """Keeps the descriptors of a model's files open while it loads."""

    def __init__(self) -> None:
        self._files: dict[Path, RangeFile] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, name: str, start: int, out: Bytes) -> None:
        """Fills `out`, contiguous, with bytes of the tensor `name`, which lie from `start` on in the file."""
        if self._file(path).read(start, out) < out.size:
            raise CheckpointError(f"{path} ended inside the tensor {name}: it changed while it was read")

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _file(self, path: Path) -> RangeFile:
        with self._lock:
            found = self._files.get(path)
            if found is None:
                found = self._files[path] = RangeFile(path)
            return found


class TensorReader:
    """Of safetensors. Use as a context manager."""

    def __init__(self) -> None:
        self._files = FilesOfTensors()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.close()

    def read(self, entry: TensorEntry, out: torch.Tensor, first: int = 0) -> None:
        """Fills the contiguous `out` with the tensor's elements from number `first` on, converted to out's dtype."""
        dtype = DISK_DTYPES[entry.dtype]
        flat = out.view(-1)
        start = entry.start + first * dtype.itemsize
        if start + flat.numel() * dtype.itemsize > entry.end:
            raise ValueError(f"{entry.name} has no {flat.numel()} elements from {first} on")
        if flat.numel() == 0:
            return
        if out.dtype == dtype:
            self._read_bytes(entry, flat, start)
            return
        staging = torch.empty(min(STAGING_BYTES // dtype.itemsize, flat.numel()), dtype=dtype)
        for block in torch.split(flat, staging.numel()):
            part = staging[: block.numel()]
            self._read_bytes(entry, part, start)
            block.copy_(part)
            start += part.numel() * dtype.itemsize

    def _read_bytes(self, entry: TensorEntry, flat: torch.Tensor, start: int) -> None:
        self._files.read(entry.file, entry.name, start, flat.view(torch.uint8).numpy())
