"""A repository's model as a folder whose weights are headers with holes behind: what reads headers can read it all."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ftengine.errors import CheckpointError
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.header import MAX_HEADER_BYTES
from ftlaunch.store.hub.errors import HubError
from ftlaunch.store.hub.limits import Limits, from_environment
from ftlaunch.store.hub.ranges import Source
from ftlaunch.store.hub.reader import Reader
from ftlaunch.store.hub.repository import RemoteFile, is_offline, look_up, token
from ftlaunch.store.hub.selection import choose, is_weight
from ftlaunch.store.names import HubName, weights_path

FIRST = 256 << 10  # bytes of the first request for a safetensors file; larger headers take a second one
GGUF_FIRST, GGUF_MOST = 8 << 20, 128 << 20  # of a GGUF file, whose header says nowhere how long it is
TEXTS = ("tokenizer", "vocab", "merges", "chat_template", "special_tokens", "added_tokens")  # tell nothing of weights
MAX_TEXT = 8 << 20  # configuration and index are smaller

Say = Callable[[str], None]


@dataclass(frozen=True)
class Skeleton:
    """path: what Checkpoint.open takes. bytes: that a pull would fetch."""

    path: Path
    bytes: int


@contextmanager
def skeleton(meant: HubName, say: Say, limits: Limits | None = None) -> Iterator[Skeleton]:
    """In a temporary folder, gone with the block. Raises HubError, CheckpointError for headers of no sound file."""
    limits = limits or from_environment()
    if is_offline():
        raise HubError(f"{meant.shown} is not on this machine, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
    repository = look_up(meant.repo, meant.revision or "main", limits, say)
    source = Source(repository, token(), limits)
    with closing(Reader(source, say)) as reader, TemporaryDirectory(prefix="ft-") as name:
        files = choose(repository, (), meant.gguf, reader.whole)
        path = lay_out(source, files, reader, Path(name), say)
        yield Skeleton(path, sum(file.size for file in files))


def lay_out(source: Source, files: Sequence[RemoteFile], reader: Reader, folder: Path, say: Say) -> Path:
    """Headers and small files of the chosen `files` in `folder`. Returns what Checkpoint.open takes."""
    for file in files:
        if not is_weight(file.path) and file.size <= MAX_TEXT and _tells(file.path):
            (folder / file.path).write_bytes(reader.whole(file))
    weights = [file for file in files if is_weight(file.path)]
    if weights and weights[0].path.lower().endswith(".gguf"):
        return _gguf(source, weights, folder, say)
    with ThreadPoolExecutor(min(source.limits.connections, max(1, len(weights)))) as pool:
        list(pool.map(lambda file: _hole(folder, file, _safetensors(source, file, say)), weights))
    return folder


def _tells(path: str) -> bool:
    return path.endswith(".json") and not path.startswith(TEXTS)


def _safetensors(source: Source, file: RemoteFile, say: Say) -> bytes:
    """Its header, with the length before it."""
    with closing(Reader(source, say)) as reader:
        start = reader.range(file, 0, min(FIRST, file.size)) if file.size else b""
        (length,) = struct.unpack("<Q", start[:8].ljust(8, b"\0"))
        needed = min(8 + length, file.size)
        if len(start) < needed and length <= MAX_HEADER_BYTES:
            start += reader.range(file, len(start), needed)
        return start


def _gguf(source: Source, files: Sequence[RemoteFile], folder: Path, say: Say) -> Path:
    """More of the files until what is there can be read."""
    with closing(Reader(source, say)) as reader:
        starts, size = [b""] * len(files), GGUF_FIRST
        while True:
            for number, file in enumerate(files):
                end = min(size, file.size)
                starts[number] += reader.range(file, len(starts[number]), end) if end > len(starts[number]) else b""
                _hole(folder, file, starts[number])
            path = weights_path(folder)
            try:
                Checkpoint.open(path).tensors()
            except CheckpointError:
                if size >= GGUF_MOST or all(size >= file.size for file in files):
                    raise
                size *= 4
            else:
                return path


def _hole(folder: Path, file: RemoteFile, start: bytes) -> None:
    with (folder / file.path.rpartition("/")[2]).open("wb") as out:
        out.write(start)
        out.truncate(file.size)
