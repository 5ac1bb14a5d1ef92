"""The disk tier's own descriptors and figures."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from ftengine.cache.sessions import Sessions
from ftengine.cache.tiers.arena import Arena
from ftengine.cache.tiers.books import Books
from ftengine.cache.tiers.disk import DiskTier, _Other
from ftengine.cache.tiers.shape import RecordShape
from tests.cache.tiers.device import HYBRID, IDENTITY, open_bench, prompt, until


def opened(folder: Path) -> DiskTier:
    books = Books(RecordShape.of(HYBRID), Sessions(), Arena(1 << 20), transit=True)
    return DiskTier(folder, IDENTITY, books, 1 << 30)


def open_below(folder: Path) -> list[str]:
    """What this process has open there."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(folder))]


def test_a_folder_that_cannot_be_opened_anew_closes_nobody_elses_files(tmp_path: Path) -> None:
    """`ft cache clear`, then a file in the folder's place: each write tries again, until the file is gone."""
    folder = tmp_path / "prompts"
    bench = open_bench(HYBRID, 64 << 20, 64 << 20, folder)
    failures = Failures(bench.tiers._disk)
    shutil.rmtree(folder)
    folder.write_text("a file")
    bench.keep(prompt(700))
    until(lambda: failures.count)
    # These take the numbers of descriptors that are closed by now.
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(6)]
    before = failures.count
    until(lambda: failures.count > before + 1)
    closed = []
    for number in others:
        try:
            os.close(number)
        except OSError:
            closed.append(number)
    assert closed == []
    folder.unlink()
    bench.written()
    bench.close()
    assert len(list((folder / IDENTITY.key).glob("*-*"))) == 2


class Failures:
    """Counts the writes that fail."""

    def __init__(self, disk: DiskTier) -> None:
        self.count = 0
        self._write, disk.write = disk.write, self

    def __call__(self, *arguments: object) -> bool:
        try:
            return self._write(*arguments)
        except OSError:
            self.count += 1
            raise


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is open")
@pytest.mark.parametrize("stands", ["lock", IDENTITY.key, f"{IDENTITY.key}/key.json"])
def test_what_was_opened_before_a_failure_is_closed(stands: str, tmp_path: Path) -> None:
    """A folder where the lock or the identity should be, a link where the identity's folder should be."""
    if stands == IDENTITY.key:
        (tmp_path / stands).symlink_to(tmp_path)
    else:
        (tmp_path / stands).mkdir(parents=True)
    with pytest.raises(OSError):
        opened(tmp_path)
    assert open_below(tmp_path) == []


def test_closed_once_and_for_all(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    disk.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    disk.close()
    for number in others:
        os.close(number)


def test_its_size_can_be_asked_while_another_identitys_folder_goes(tmp_path: Path) -> None:
    """The step loop asks, and the disk's thread may get the interpreter at any place: here between two folders."""
    disk = opened(tmp_path)

    class Going(_Other):
        @property
        def size(self) -> int:
            disk._others.pop("last", None)
            return 10

        @size.setter
        def size(self, value: int) -> None:
            pass

    disk._others = {name: Going(0, 0.0, 10, []) for name in ("first", "middle", "last")}
    with contextlib.closing(disk):
        assert disk.used in (20, 30)
