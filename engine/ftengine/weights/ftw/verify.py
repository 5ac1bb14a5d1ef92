"""Checks every byte of an FTW directory against the hashes in its header. Torch-free."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ftengine.weights.files import locate, open_regular
from ftengine.weights.ftw.header import data_path, read_header
from ftengine.weights.ftw.layout import Attachment, Header
from ftengine.weights.ranges import CHUNK_BYTES, RangeReader, aligned_bytes

Progress = Callable[[int, int], None]  # bytes done, bytes of all


@dataclass(frozen=True)
class Fault:
    file: str
    what: str  # the tensor or expert that changed; empty: the whole file

    def __str__(self) -> str:
        return f"{self.what} in {self.file}" if self.what else self.file


@dataclass(frozen=True)
class _Piece:
    file: int
    offset: int
    length: int
    sha256: str
    what: str


def verify(folder: Path, progress: Progress = lambda done, total: None, threads: int | None = None) -> list[Fault]:
    """What does not match its hash, in the order of the files; empty when every byte is as it was written.

    Raises CheckpointError when the header itself is unsound, or a file is missing, has another size or cannot be read.
    """
    header = read_header(folder)
    paths = [data_path(folder, file.name, file.size) for file in header.files]
    done = sum(attachment.size for attachment in header.attachments)
    total = done + sum(file.size for file in header.files)
    faults = [Fault(item.name, "") for item in header.attachments if not _attachment_is_whole(folder, item)]
    count = threads or os.cpu_count() or 1
    with RangeReader(paths, threads=1) as reader, ThreadPoolExecutor(2 * count, "ftw-verify") as pool:
        waiting: deque[tuple[_Piece, Future[bool]]] = deque()
        try:
            for piece in _pieces(header):
                waiting.append((piece, pool.submit(_is_whole, reader, piece)))
                while len(waiting) >= 4 * count or (waiting and waiting[0][1].done()):
                    done += _settle(header, waiting, faults)
                    progress(done, total)
            while waiting:
                done += _settle(header, waiting, faults)
                progress(done, total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return faults


def _settle(header: Header, waiting: deque[tuple[_Piece, Future[bool]]], faults: list[Fault]) -> int:
    piece, future = waiting.popleft()
    if not future.result():
        faults.append(Fault(header.files[piece.file].name, piece.what))
    return piece.length


def _pieces(header: Header) -> Iterator[_Piece]:
    for tensor in header.tensors:
        yield _Piece(tensor.file, tensor.offset, tensor.extent, tensor.sha256, f"the tensor {tensor.name}")
    for section in header.experts:
        size = section.layout.block_bytes
        for expert, sha256 in enumerate(section.sha256):
            what = f"expert {expert} of layer {section.layer}"
            yield _Piece(section.file, section.offset + expert * size, size, sha256, what)


def _is_whole(reader: RangeReader, piece: _Piece) -> bool:
    digest = hashlib.sha256()
    buffer = aligned_bytes(min(CHUNK_BYTES, piece.length))
    for at in range(0, piece.length, CHUNK_BYTES):
        part = buffer[: min(CHUNK_BYTES, piece.length - at)]
        reader.read_here(piece.file, piece.offset + at, part)
        digest.update(part.data)
    return digest.hexdigest() == piece.sha256


def _attachment_is_whole(folder: Path, attachment: Attachment) -> bool:
    path = locate(folder, attachment.name)
    if path is None:
        return False
    digest, size = hashlib.sha256(), 0
    with os.fdopen(open_regular(path), "rb") as file:
        while size <= attachment.size and (block := file.read(CHUNK_BYTES)):
            digest.update(block)
            size += len(block)
    if size != attachment.size:
        return False
    return digest.hexdigest() == attachment.sha256
