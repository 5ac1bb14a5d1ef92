"""What the weights of a repository consist of, from the headers of its safetensors files, read by range."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ftengine.errors import CheckpointError
from ftengine.weights.header import MAX_HEADER_BYTES, read_header
from ftlaunch.store.fit import Weights
from ftlaunch.store.hub.errors import HubError
from ftlaunch.store.hub.patience import Say
from ftlaunch.store.hub.ranges import Source
from ftlaunch.store.hub.reader import Reader
from ftlaunch.store.hub.repository import RemoteFile

FIRST = 256 << 10  # bytes of the first request; larger headers take a second one
EXPERT = ".experts."


def weigh(source: Source, files: Sequence[RemoteFile], say: Say) -> Weights:
    """Of the chosen files. Raises HubError for a header that no sound file can have."""
    shards = [file for file in files if file.path.lower().endswith(".safetensors")]
    others = sum(file.size for file in files if file.path.lower().endswith(".gguf"))
    with ThreadPoolExecutor(min(source.limits.connections, max(1, len(shards)))) as pool:
        experts, totals = 0, others
        for own, total in pool.map(lambda shard: _weigh(source, shard, say), shards):
            experts, totals = experts + own, totals + total
    return Weights(totals, experts)


def _weigh(source: Source, shard: RemoteFile, say: Say) -> tuple[int, int]:
    """Bytes of experts, and of all tensors."""
    reader = Reader(source, say)
    try:
        start = reader.range(shard, 0, min(FIRST, shard.size)) if shard.size else b""
        (length,) = struct.unpack("<Q", start[:8].ljust(8, b"\0"))
        needed = min(8 + length, shard.size)
        if len(start) < needed and length <= MAX_HEADER_BYTES:
            start += reader.range(shard, len(start), needed)
    finally:
        reader.close()
    with tempfile.TemporaryDirectory(prefix="ft-") as folder:
        path = Path(folder) / "header"
        with path.open("wb") as file:
            file.write(start)
            file.truncate(shard.size)  # a hole: the check wants to see the size that the file will have
        try:
            tensors = read_header(path).values()
        except CheckpointError as error:
            reason = str(error).replace(str(path), shard.path)
            raise HubError(f"{reason} (in {source.repository.name})", "choose another model") from None
    return sum(t.nbytes for t in tensors if EXPERT in t.name), sum(t.nbytes for t in tensors)
