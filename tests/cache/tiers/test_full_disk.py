"""A disk that is full, fails, or is too slow: serving goes on, one warning, and writing goes on when there is room."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftengine.core import CacheLayout, StateSpec
from tests.cache.tiers.device import IDENTITY, Bench, open_bench, prompt, until

LAYOUT = CacheLayout(1, 1, 64, "float32", ((StateSpec("s", (64, 256), "float32"),),))  # 64 KiB; a chunk: 256 KiB


def opened(folder: Path, host: int = 32 << 20, disk: int = 32 << 20) -> Bench:
    return open_bench(LAYOUT, host, disk, folder, pages=256)


def restores(bench: Bench, tokens: list[int]) -> None:
    found = bench.find(tokens)
    assert found is not None
    ticket = bench.restore(tokens, found)
    assert ticket.tokens == len(tokens)
    bench.check_restored(tokens, ticket)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Failing:
    """Lets `left` calls pass, then each fails until `mended`."""

    def __init__(self, real: Callable[..., object], left: int, code: int) -> None:
        self._real, self._left, self._code = real, left, code
        self.failures, self.mended = 0, False

    def __call__(self, *arguments: object, **named: object) -> object:
        self._left -= 1
        if self._left >= 0 or self.mended:
            return self._real(*arguments, **named)
        self.failures += 1
        raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
def test_the_nth_call_fails(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for left in range(4):
        folder = tmp_path / str(left)
        caplog.clear()
        bench = opened(folder)
        with monkeypatch.context() as patch:
            failing = Failing(getattr(os, call), left, code)
            patch.setattr(f"ftengine.cache.tiers.files.os.{call}", failing)
            for number in range(3):
                tokens = prompt(700, number)
                bench.keep(tokens)
                restores(bench, tokens)
            until(lambda: warnings(caplog))
            assert failing.failures
            assert len(warnings(caplog)) == 1
            assert "serving goes on" in warnings(caplog)[0]
            names = [entry.name for entry in (folder / IDENTITY.key).iterdir()]
            failing.mended = True
            bench.written()
            assert call == "rename" or not [name for name in names if name.startswith(".")]
        until(lambda: "prompts are written to" in caplog.text)
        assert len(warnings(caplog)) == 1
        bench.close()
        bench = opened(folder)
        for number in range(3):
            restores(bench, prompt(700, number))
        bench.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("mounting needs root; the injected failures above stand for it")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount; the injected failures above stand for it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("host", [32 << 20, 0])
def test_a_disk_that_is_really_full(host: int, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is on it stays of use; when another program gives room back, writing goes on."""
    caplog.set_level(logging.INFO)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (1 << 20))
    bench = opened(small_disk / "prompts", host)
    for number in range(4):  # 0.4 MB each
        bench.keep(prompt(700, number))
    until(lambda: warnings(caplog))
    assert len(warnings(caplog)) == 1
    assert "No space left" in warnings(caplog)[0]
    filler.unlink()
    until(lambda: "prompts are written to" in caplog.text)
    bench.close()
    bench = opened(small_disk / "prompts", host)
    found = [number for number in range(4) if bench.find(prompt(700, number)) is not None]
    for number in found:
        restores(bench, prompt(700, number))
    bench.close()
    assert len(found) >= 3


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file stands where the folder should be: the host tier goes on without a disk tier."""
    (tmp_path / "prompts").write_text("a file")
    bench = opened(tmp_path / "prompts")
    assert len(warnings(caplog)) == 1
    tokens = prompt(700)
    bench.keep(tokens)
    restores(bench, tokens)
    assert [size.name for size in bench.tiers.sizes()] == ["host"]
    bench.close()
