"""How fast the store's disk is read, past the page cache: a file of a model, else one made for it that has no name."""

from __future__ import annotations

import errno
import mmap
import os
import random
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ftlaunch import paths
from ftlaunch.machine.disk import nearest
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.verdict import Finding, rate

BLOCK, THREADS = 4 << 20, 8  # as weights are read: enough requests in flight to keep an NVMe disk busy
SECONDS, QUICK_SECONDS = 1.0, 0.2
LEAST_FILE = 64 << 20
MADE, QUICK_MADE = 128 << 20, 16 << 20  # bytes of the file that is made
KEPT_FREE = 2 << 30  # on a disk with less nothing is made
SLOW = 0.4e9  # bytes a second: of a SATA SSD
MODEL = 20e9  # bytes, of the models that this is for


class NotMeasured(Exception):
    """A clause that says why."""


def probe(asked: Asked) -> Iterator[Finding]:
    yield read(paths.models(), asked.quick)


def read(models: Path, quick: bool) -> Finding:
    data: dict[str, object] = {"bytes_per_second": None, "file": None}
    try:
        path = largest(models)
        fd = _open(path) if path is not None else made(nearest(models), QUICK_MADE if quick else MADE)
        data["file"] = None if path is None else str(path)
        try:
            measured = bandwidth(fd, QUICK_SECONDS if quick else SECONDS)
        finally:
            os.close(fd)
    except (NotMeasured, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return Finding("disk.read", "reading", f"not measured: {reason}", "note", data=data)
    data["bytes_per_second"] = measured
    value = f"{rate(measured)}: a model of 20 GB takes {MODEL / measured:.0f} s"
    if path is None:
        value += " (of a new file; ft pull demo, then it is measured of a model's)"
    if measured >= SLOW or (quick and path is None):  # so little, just written, tells no more than the order
        return Finding("disk.read", "reading", value, data=data)
    cost = "the start of a large model takes minutes where it is not in the page cache"
    return Finding("disk.read", "reading", value, "warn", cost, "FT_HOME on a faster disk", data)


def largest(models: Path) -> Path | None:
    """The largest file of the store's models, if it is large enough to tell; links are not followed."""
    found: tuple[int, Path] | None = None
    for path in models.glob("*/*"):
        try:
            status = path.lstat()
        except OSError:  # removed meanwhile
            continue
        if stat.S_ISREG(status.st_mode) and status.st_size >= LEAST_FILE and (not found or status.st_size > found[0]):
            found = status.st_size, path
    return found[1] if found else None


def made(folder: Path, size: int) -> int:
    """A descriptor of a new file without a name, which is gone however this ends. Raises NotMeasured, OSError."""
    if not hasattr(os, "O_TMPFILE") or not hasattr(os, "O_DIRECT"):
        raise NotMeasured("there is no model yet to read, ft pull demo fetches one")
    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize < KEPT_FREE:
        raise NotMeasured("there is no model yet to read, and no room to try")
    written = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        chunk = random.Random(0).randbytes(1 << 20)  # what a disk or file system cannot shrink
        for _ in range(size // len(chunk)):
            os.write(written, chunk)
        os.fsync(written)
        return _open(Path(f"/proc/self/fd/{written}"))
    finally:
        os.close(written)


def bandwidth(fd: int, seconds: float) -> float:
    """Bytes a second of large blocks at random places, none of them twice. Raises NotMeasured, OSError."""
    places = list(range(0, os.fstat(fd).st_size // BLOCK * BLOCK, BLOCK))
    random.shuffle(places)
    began = time.monotonic()

    def worker() -> int:
        buffer, count = mmap.mmap(-1, BLOCK), 0
        while time.monotonic() - began < seconds:
            try:
                at = places.pop()
            except IndexError:
                break
            count += os.preadv(fd, [buffer], at)
        return count

    try:
        with ThreadPoolExecutor(THREADS) as threads:
            total = sum(threads.map(lambda _: worker(), range(THREADS)))
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise NotMeasured("its file system has no reads past the page cache") from None
        raise
    if not total:
        raise NotMeasured("nothing could be read in time")
    return total / (time.monotonic() - began)


def _open(path: Path) -> int:
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        raise NotMeasured("this system has no reads past the page cache")
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | direct)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            raise NotMeasured("its file system has no reads past the page cache") from None
        raise
