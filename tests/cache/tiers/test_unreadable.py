"""Files that are as they should be, but cannot be read just now: they stay, unless it is they that are at fault."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftengine.core import CacheLayout
from tests.cache.tiers.device import ATTENTION, HYBRID, Bench, open_bench, until
from tests.cache.tiers.test_faults import PLACES, TOKENS, filled, records


def loaded(folder: Path, layout: CacheLayout = HYBRID) -> Bench:
    """Opened, with all that lies in the folder in its books."""
    bench = open_bench(layout, 64 << 20, 64 << 20, folder)
    until(bench.tiers._writer.loaded.is_set)
    return bench


def tried(bench: Bench) -> tuple[int, str]:
    found = bench.find(TOKENS)
    assert found is not None
    ticket = bench.restore(TOKENS, found)
    if ticket.tokens:
        bench.check_restored(TOKENS, ticket)
    return ticket.tokens, ticket.reason


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process may open none."""
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_open_files_cost_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However often: afterwards all of it is restored."""
    filled(tmp_path)
    bench = loaded(tmp_path)
    names = records(tmp_path)
    with no_more_files():
        for _ in range(3):
            tokens, reason = tried(bench)
            assert tokens == 0
            assert os.strerror(errno.EMFILE) in reason
    assert records(tmp_path) == names
    assert "its file stays" in caplog.text
    assert bench.tiers.sizes()[1].failures == 0
    assert tried(bench) == (1300, "")
    bench.close()


def test_without_states_what_is_in_place_stays_of_use(tmp_path: Path) -> None:
    bench = open_bench(ATTENTION, 64 << 20, 64 << 20, tmp_path)
    bench.keep(TOKENS)
    bench.close()
    bench = loaded(tmp_path, ATTENTION)
    found, names = bench.find(TOKENS, above=528), records(tmp_path)
    assert found is not None
    with no_more_files():
        ticket = bench.restore(TOKENS, found, 528)
    assert ticket.tokens == 528
    assert ticket.reason
    assert records(tmp_path) == names
    bench.check_restored(TOKENS, ticket)
    bench.close()


class BadSectors:
    """Reading one file fails beyond its header."""

    def __init__(self, victim: Path) -> None:
        self._inode = victim.stat().st_ino
        self._real = os.preadv
        self.mended = False

    def __call__(self, fd: int, *arguments: object) -> int:
        if os.fstat(fd).st_ino == self._inode and not self.mended:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._real(fd, *arguments)


def test_a_file_that_the_disk_cannot_read_is_given_up_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deepest place that does without it takes over."""
    filled(tmp_path)
    bench = loaded(tmp_path)
    victim = next(path for path in records(tmp_path) if path.name.startswith(f"{PLACES[2]:08x}"))
    monkeypatch.setattr("ftengine.cache.tiers.disk.os.preadv", BadSectors(victim))
    tokens, reason = tried(bench)
    assert (tokens, victim.exists()) == (0, True)
    assert os.strerror(errno.EIO) in reason
    tokens, reason = tried(bench)
    assert (tokens, victim.exists()) == (PLACES[1], False)
    assert os.strerror(errno.EIO) in reason
    assert bench.tiers.sizes()[1].failures == 1
    assert len(records(tmp_path)) == 4
    bench.close()


def test_twice_is_twice_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was away for a moment, and again later, costs no record."""
    filled(tmp_path)
    bench = loaded(tmp_path)
    victim = next(path for path in records(tmp_path) if path.name.startswith(f"{PLACES[2]:08x}"))
    bad = BadSectors(victim)
    monkeypatch.setattr("ftengine.cache.tiers.disk.os.preadv", bad)
    for _ in range(3):
        bad.mended = False
        assert tried(bench)[0] == 0
        bad.mended = True
        assert tried(bench) == (1300, "")
        books = bench.tiers._books
        for record in list(books.index.by_key.values()):  # out of host memory, so that files are read again
            if record.host is not None:
                books.drop_host(record)
    assert victim.exists()
    bench.close()


def test_a_link_in_a_records_place_is_damage(tmp_path: Path) -> None:
    filled(tmp_path / "prompts")
    bench = loaded(tmp_path / "prompts")
    victim = next(path for path in records(tmp_path / "prompts") if path.name.startswith(f"{PLACES[2]:08x}"))
    secret = tmp_path / "secret"
    victim.rename(secret)
    victim.symlink_to(secret)
    tokens, reason = tried(bench)
    assert tokens == PLACES[1]
    assert "something else bears its name" in reason
    assert not victim.is_symlink()
    assert secret.exists()
    bench.close()
