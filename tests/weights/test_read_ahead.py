"""Reading before it is asked for: the bytes and the sentences of `RangeReader.read`, and an end in between."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ftengine.errors import CheckpointError
from ftengine.weights import read_ahead
from ftengine.weights.ranges import RangeReader, aligned_bytes
from ftengine.weights.read_ahead import ReadAhead

STEP = 256 << 10  # large enough for direct reads
SIZE = 9 * STEP + 4096
WAIT = 60.0


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "STEP_BYTES", STEP)


@pytest.fixture(scope="module")
def content() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def path(content: np.ndarray, tmp_path: Path) -> Path:
    target = tmp_path / "data.ftw"
    target.write_bytes(content.tobytes())
    return target


class Gate:
    """In the place of os.preadv: threads that read ahead wait until it is opened."""

    def __init__(self) -> None:
        self._real = os.preadv
        self.opened, self.came, self.calls = threading.Event(), threading.Event(), 0

    def __call__(self, *arguments: object) -> int:
        if threading.current_thread().name.startswith("ahead"):
            self.calls += 1
            self.came.set()
            assert self.opened.wait(WAIT)
        return self._real(*arguments)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


@pytest.mark.parametrize("state", ["cached", "on the disk"])
def test_every_range_is_the_files(path: Path, content: np.ndarray, state: str) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if state == "on the disk":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ranges = {"whole": (0, SIZE), "middle": (8192, 3 * STEP), "short": (4096, 4096), 7: (STEP, STEP + 4096)}
    with RangeReader([path], threads=3) as reader:
        ahead = ReadAhead(reader)
        for key, (offset, size) in ranges.items():
            ahead.begin(key, 0, offset, size)
        for key, (offset, size) in reversed(ranges.items()):
            memory = ahead.memory(key)
            taken = ahead.take(key)
            assert taken is memory
            assert np.array_equal(taken, content[offset : offset + size])
            assert (ahead.memory(key), ahead.take(key)) == (None, None), "taken once"
        assert ahead.take("never begun") is None
        ahead.close()


def test_how_much_was_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", gate := Gate())
    with RangeReader([path], threads=2) as reader:
        ahead = ReadAhead(reader)
        ahead.begin("whole", 0, 0, SIZE)
        assert gate.came.wait(WAIT)
        assert ahead.read_bytes() == 0
        gate.opened.set()
        wait_until(lambda: ahead.read_bytes() == SIZE)
        assert ahead.take("whole") is not None
        assert ahead.read_bytes() == 0
        ahead.close()


def failing(*arguments: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def shorter(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(path, SIZE - 5000)


def changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(path, ns=(1, 1))


def broken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", failing)


@pytest.mark.parametrize("happens", [shorter, changed, broken])
def test_what_is_wrong_is_said_when_it_is_taken_and_in_the_same_words(
    happens: Callable[[Path, pytest.MonkeyPatch], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RangeReader([path], threads=3) as reader:
        happens(path, monkeypatch)
        with pytest.raises(CheckpointError) as plain:
            reader.read(0, 0, aligned_bytes(SIZE))
        ahead = ReadAhead(reader)
        ahead.begin("whole", 0, 0, SIZE)
        with pytest.raises(CheckpointError) as taken:
            ahead.take("whole")
        assert (str(taken.value), taken.value.next_step) == (str(plain.value), plain.value.next_step)
        ahead.close()


def test_an_end_in_between(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads are in the middle of a step: these end, no other step begins, and the memory is given back."""
    monkeypatch.setattr(os, "preadv", gate := Gate())
    before = len(reading_threads())
    with RangeReader([path], threads=2) as reader:
        ahead = ReadAhead(reader)
        for key in range(5):
            ahead.begin(key, 0, 0, SIZE)
        kept = [weakref.ref(ahead.memory(key)) for key in range(5)]
        assert gate.came.wait(WAIT)
        closing = threading.Thread(target=ahead.close)
        closing.start()
        wait_until(lambda: ahead._pool._shutdown)
        gate.opened.set()
        closing.join(WAIT)
        assert not closing.is_alive()
        assert len(reading_threads()) == before
        # Of the 50 steps, and at most three calls for each: the page cache is asked twice, then the disk.
        assert gate.calls <= 3 * 10
    gc.collect()
    assert [memory() for memory in kept] == [None] * 5


def test_other_reads_do_not_wait_behind(path: Path, content: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", gate := Gate())
    with RangeReader([path], threads=2) as reader:
        ahead = ReadAhead(reader)
        ahead.begin("whole", 0, 0, SIZE)
        assert gate.came.wait(WAIT)
        out = aligned_bytes(SIZE)
        reader.read(0, 0, out)
        assert np.array_equal(out, content)
        assert not gate.opened.is_set()
        gate.opened.set()
        ahead.close()
