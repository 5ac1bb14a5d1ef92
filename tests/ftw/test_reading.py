"""Reading ranges: the right bytes wherever they come from, and a sentence when they do not come."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ftengine.errors import CheckpointError
from ftengine.weights import ranges
from ftengine.weights.buffer import host_buffer
from ftengine.weights.ftw.source import FtwSource
from ftengine.weights.ranges import CHUNK_BYTES, RangeReader, aligned_bytes

SIZE = 3 * CHUNK_BYTES + 12_288
MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def path(content: np.ndarray, tmp_path: Path) -> Path:
    """On the disk, and in the page cache."""
    target = tmp_path / "data.ftw"
    target.write_bytes(content.tobytes())
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return target


def forget(path: Path) -> None:
    """Takes the file out of the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(path: Path, offset: int) -> bool:
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


@pytest.mark.parametrize("state", ["cached", "on the disk", "partly cached"])
@pytest.mark.parametrize("shift", [0, 64, 1])
def test_every_range_is_the_files(path: Path, content: np.ndarray, state: str, shift: int) -> None:
    """Ranges of odd lengths, into memory that begins at a page or not."""
    with RangeReader([path], threads=3) as reader:
        for offset, size in ((0, SIZE), (4096, 1), (8192, 4096), (4096, CHUNK_BYTES + 4097), (SIZE - 4096, 4096)):
            if state != "cached":
                forget(path)
            if state == "partly cached":
                with path.open("rb") as file:
                    file.seek(offset + size // 2)
                    file.read(8192)
            out = aligned_bytes(size + shift)[shift:]
            reader.read(0, offset, out)
            assert np.array_equal(out, content[offset : offset + size])


def test_what_is_not_cached_is_read_past_the_cache(path: Path) -> None:
    """Only where the file system takes O_DIRECT."""
    with RangeReader([path]) as reader:
        if reader.files[0].direct is None:
            pytest.skip("no direct I/O here")
        forget(path)
        reader.read(0, 0, aligned_bytes(SIZE))
    assert not cached(path, 2 * CHUNK_BYTES + 65_536)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no tmpfs here")
def test_tmpfs(content: np.ndarray) -> None:
    target = MEMORY / f"ftw-{os.getpid()}"
    try:
        target.write_bytes(content.tobytes())
        with RangeReader([target]) as reader:
            out = aligned_bytes(SIZE)
            reader.read(0, 0, out)
            assert np.array_equal(out, content)
    finally:
        target.unlink()


def test_without_direct_io(path: Path, content: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and on file systems that refuse it."""
    monkeypatch.setattr(ranges, "DIRECT", 0)
    forget(path)
    with RangeReader([path]) as reader:
        assert reader.files[0].direct is None
        out = aligned_bytes(SIZE)
        reader.read(0, 0, out)
        assert np.array_equal(out, content)


def test_direct_io_that_wants_another_alignment(
    path: Path, content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def strict(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if descriptor == direct:
            raise OSError(errno.EINVAL, "unaligned")
        return real(descriptor, buffers, offset, flags)

    with RangeReader([path]) as reader:
        direct = reader.files[0].direct
        monkeypatch.setattr(os, "preadv", strict)
        forget(path)
        out = aligned_bytes(SIZE)
        reader.read(0, 0, out)
        assert np.array_equal(out, content)


@pytest.mark.parametrize("state", ["cached", "on the disk"])
def test_a_file_that_shrinks(path: Path, state: str) -> None:
    with RangeReader([path]) as reader:
        if state == "on the disk":
            forget(path)
        os.truncate(path, SIZE - 5000)
        with pytest.raises(CheckpointError, match=r"data\.ftw"):
            reader.read(0, 0, aligned_bytes(SIZE))


def test_a_file_that_is_written_to(path: Path) -> None:
    with RangeReader([path]) as reader:
        reader.read(0, 0, aligned_bytes(4096))
        with path.open("r+b") as file:
            file.write(b"changed")
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointError, match="changed while it was read"):
            reader.read(0, 0, aligned_bytes(4096))


def test_a_disk_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO at the fifth read of many that run at once: one sentence, and nobody writes into the buffer afterwards."""
    real, calls = os.preadv, threading.Semaphore(4)

    def failing(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if not calls.acquire(blocking=False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset, flags)

    with RangeReader([path], threads=4) as reader:
        monkeypatch.setattr(os, "preadv", failing)
        out = aligned_bytes(SIZE)
        with pytest.raises(CheckpointError, match=r"data\.ftw cannot be read: Input/output error"):
            reader.read(0, 0, out)
        before = out.copy()
        monkeypatch.undo()
        assert np.array_equal(out, before)


def test_several_threads_share_a_source(converted: Path) -> None:
    with FtwSource(converted) as source:
        expected = {name: source.plain(name, torch.float32) for name in source.tensors()}
        layout = source.expert_layout(0)
        assert layout is not None
        bank = host_buffer(3 * layout.block_bytes).view(3, -1)
        source.read_experts(0, bank)
        wrong: list[str] = []

        def read() -> None:
            for name, tensor in expected.items():
                if not torch.equal(source.plain(name, torch.float32), tensor):
                    wrong.append(name)
            own = torch.empty(3, layout.block_bytes, dtype=torch.uint8)  # as an allocator gives it, not at a page
            source.read_experts(0, own)
            if not torch.equal(own, bank):
                wrong.append("experts")

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_what_a_source_does_not_have(converted: Path) -> None:
    with FtwSource(converted) as source:
        layout = source.expert_layout(0)
        assert layout is not None
        assert source.expert_layout(7) is None
        refused: list[tuple[Callable[[], object], str]] = [
            (lambda: source.matrix("layers.9.x"), "is missing"),
            (lambda: source.matrix("norm.weight"), "no matrix"),
            (lambda: source.read_experts(7, torch.empty(1, 1, dtype=torch.uint8)), "no experts in layer 7"),
            (
                lambda: source.read_experts(0, torch.empty(4, layout.block_bytes, dtype=torch.uint8)),
                "has 3 experts in layer 0, 4 are wanted",
            ),
        ]
        for call, words in refused:
            with pytest.raises(CheckpointError, match=words):
                call()
        with pytest.raises(ValueError, match="expected contiguous bytes"):
            source.read_experts(0, torch.empty(3, 5, dtype=torch.uint8))
