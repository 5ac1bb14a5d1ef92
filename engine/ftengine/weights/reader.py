"""Reads checked tensor entries from disk straight into their final place in host memory.

Plain positioned reads, not a memory map: a file that shrinks while it is read gives a CheckpointError here, and
would end the process with SIGBUS there; and a conversion never holds more than one staging block.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import torch

from ftengine.errors import CheckpointError
from ftengine.weights.files import open_regular
from ftengine.weights.header import TensorEntry

STAGING_BYTES = 16 << 20
DISK_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorReader:
    """Keeps the shards' descriptors open while a model loads. Use as a context manager."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

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
        descriptor = self._descriptors.get(entry.file)
        if descriptor is None:
            descriptor = self._descriptors[entry.file] = open_regular(entry.file)
        buffer = memoryview(flat.view(torch.uint8).numpy().data)
        while len(buffer):
            count = os.preadv(descriptor, [buffer[:STAGING_BYTES]], start)
            if count == 0:
                raise CheckpointError(
                    f"{entry.file} ended inside the tensor {entry.name}: it changed while it was read"
                )
            buffer, start = buffer[count:], start + count
