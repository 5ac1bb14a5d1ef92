"""Every byte of a model against the hashes that were recorded when it came: those of the manifest, of the Hugging Face
cache's file names, or of FTW's header. Of a model without any, headers and sizes are checked, and the report says so.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import CheckpointError
from ftengine.weights.files import locate, open_regular
from ftlaunch.store import manifest
from ftlaunch.store.find import Found
from ftlaunch.store.names import again

BLOCK = 4 << 20
MAX_THREADS = 4  # a disk is rarely faster than four cores hash
SHA256, GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")

Progress = Callable[[float], None]  # fraction 0..1


@dataclass(frozen=True)
class Fault:
    file: str
    what: str  # completes "the file …": "is missing", "differs from its recorded hash"


@dataclass(frozen=True)
class Report:
    """hashed: files whose every byte was compared. remedy: the command that helps when there are faults."""

    name: str
    hashed: int
    faults: list[Fault]
    remedy: str
    note: str = ""  # why less than every byte could be compared


@dataclass(frozen=True)
class _Expected:
    name: str
    size: int | None
    digest: str  # of sha256, or of git's sha1 (40 digits)


def verify(found: Found, on_progress: Progress = lambda done: None) -> Report:
    """Raises CheckpointError for what cannot be looked at at all."""
    from ftengine.weights.ftw.header import is_ftw

    directory = found.path if found.path.is_dir() else found.path.parent
    remedy = _remedy(found, directory)
    if found.path.is_dir() and is_ftw(found.path):
        return _ftw(found, on_progress)
    expected = _expected(found, directory)
    faults = _compare(directory, expected, on_progress)
    if not expected or not all(item.digest for item in expected):
        faults = faults or _headers(found)
        return Report(found.name, _hashed(expected), faults, remedy, NO_HASHES)
    return Report(found.name, len(expected), faults, remedy)


NO_HASHES = "no hashes were recorded for it: only sizes and headers could be checked"


def _hashed(expected: Iterable[_Expected]) -> int:
    return sum(bool(item.digest) for item in expected)


def _remedy(found: Found, directory: Path) -> str:
    if found.where == "store":
        return again(found.name, directory)
    if found.where == "cache":
        return f"hf download {found.name} --force-download"
    written = manifest.read(directory)
    if written is not None and written.source.kind == "hub":
        return f"ft pull {written.source.repo} --to {directory}"
    return "fetch or copy it again"


def _expected(found: Found, directory: Path) -> list[_Expected]:
    if found.where == "cache":
        return _from_cache(directory)
    written = manifest.read(directory)
    if written is None:
        return []
    return [_Expected(name, file.size, file.sha256) for name, file in written.files.items()]


def _from_cache(snapshot: Path) -> list[_Expected]:
    """The cache names what a snapshot links to by its hash: sha256 of large files, git's blob hash of small ones."""
    expected = []
    for path in sorted(snapshot.rglob("*")):
        if path.is_symlink() or path.is_file():
            name = path.relative_to(snapshot).as_posix()
            target = os.path.realpath(path).rpartition("/")[2] if path.is_symlink() else ""
            digest = target if SHA256.fullmatch(target) or GIT_SHA1.fullmatch(target) else ""
            expected.append(_Expected(name, None, digest))
    return expected


def _compare(directory: Path, expected: list[_Expected], on_progress: Progress) -> list[Fault]:
    """Largest files first, several at once."""
    work = sorted(expected, key=lambda item: -(item.size or 0))
    meter = _Meter(sum(_size(directory, item) for item in work), on_progress)
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        results = list(pool.map(lambda item: _fault(directory, item, meter), work))
    return sorted((fault for fault in results if fault is not None), key=lambda fault: fault.file)


def _size(directory: Path, item: _Expected) -> int:
    if item.size is not None:
        return item.size
    try:
        return (directory / item.name).stat().st_size
    except OSError:
        return 0


class _Meter:
    """Counts bytes from several threads. A lost update only delays what is shown."""

    def __init__(self, total: int, on_progress: Progress) -> None:
        self._total = max(1, total)
        self._done = 0
        self._on_progress = on_progress

    def add(self, count: int) -> None:
        self._done += count
        self._on_progress(min(1.0, self._done / self._total))


def _fault(directory: Path, item: _Expected, meter: _Meter) -> Fault | None:
    try:
        path = locate(directory, item.name)
        if path is None:
            return Fault(item.name, "is missing")
        size = path.stat().st_size
        if item.size is not None and size != item.size:
            return Fault(item.name, f"has {size} bytes, {item.size} were recorded")
        if item.digest and _digest(path, size, item.digest, meter) != item.digest:
            return Fault(item.name, "differs from its recorded hash")
    except CheckpointError as error:
        return Fault(item.name, f"cannot be checked: {error}")
    except OSError as error:
        return Fault(item.name, f"cannot be read: {error.strerror}")
    return None


def _digest(path: Path, size: int, expected: str, meter: _Meter) -> str:
    if len(expected) == 64:
        digest = hashlib.sha256()
    else:  # git's object id: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    buffer = memoryview(bytearray(BLOCK))
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            meter.add(count)
    return digest.hexdigest()


def _headers(found: Found) -> list[Fault]:
    from ftengine.weights.checkpoint import Checkpoint

    try:
        Checkpoint.open(found.path).tensors()
    except CheckpointError as error:
        return [Fault(found.path.name, f"cannot be used: {error}")]
    return []


def _ftw(found: Found, on_progress: Progress) -> Report:
    from ftengine.weights.ftw.header import read_header
    from ftengine.weights.ftw.layout import HEADER_FILE
    from ftengine.weights.ftw.verify import verify as verify_ftw

    remedy = "ft checkpoint again from the original model"
    try:
        header = read_header(found.path)
        found_faults = verify_ftw(found.path, lambda done, total: on_progress(done / max(1, total)))
    except CheckpointError as error:
        return Report(found.name, 0, [Fault(HEADER_FILE, f"or what it names is unsound: {error}")], remedy)
    faults = [Fault(fault.file, f"differs from its recorded hash{_where(fault.what)}") for fault in found_faults]
    return Report(found.name, 1 + len(header.files) + len(header.attachments), faults, remedy)


def _where(what: str) -> str:
    return f" in {what}" if what else ""
