"""Row 10: a disk that fills up or fails under a pull. The old model stays, the space comes back, the status is 1."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftlaunch.store.events import Event, Moved, Planned
from ftlaunch.store.fetch import fetch
from ftlaunch.store.names import HubName
from ftlaunch.store.wishes import Wishes
from tests.store.hubs import NAME, QUICK, a_hub, get, models, same
from tests.store.models import model
from tests.support.hub_server import Hub

__all__ = ["a_hub"]
COUNTS = [1, 3, 8, 21, 55]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
@pytest.mark.parametrize(
    "nth", [*COUNTS, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 201) if n not in COUNTS)]
)
def test_the_nth_write_fails(a_hub: Hub, ft_home: Path, monkeypatch: pytest.MonkeyPatch, nth: int, code: int) -> None:
    old, new = model(1000), model(9 << 20, 3 << 20, seed=1)
    a_hub.add(NAME, old)
    get()
    a_hub.add(NAME, new, commit="c" * 40)
    real, count = os.pwrite, 0

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        nonlocal count
        count += 1
        if count >= nth:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    if nth > 60:
        monkeypatch.setattr("ftlaunch.store.hub.transfer.CHUNK", 1 << 15)
    with pytest.raises(OSError, match=os.strerror(code)):
        get()
    assert same(ft_home / "models" / "org--name", old)
    assert models(ft_home) == ["org--name"]
    monkeypatch.setattr(os, "pwrite", real)
    assert same(get().path, new)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("call", ["fsync", "fdatasync", "rename", "link", "replace", "mkdir", "ftruncate"])
def test_the_nth_call_fails(
    a_hub: Hub, ft_home: Path, monkeypatch: pytest.MonkeyPatch, call: str, can_exchange: bool, code: int
) -> None:
    """The n-th call fails, for every n until a pull gets through: the model is the old one or the new one, whole, and
    nothing lies beside it. `replace` is the manifest's last step; its fsync is one of those here.
    """
    if not can_exchange:
        monkeypatch.setattr("ftlaunch.store.folder.exchange", lambda one, other, folder: False)
    old, new = model(1000), model(9000, 3000, seed=1)
    folder = ft_home / "models" / "org--name"
    for nth in range(1, 60):
        a_hub.add(NAME, old)
        get()
        a_hub.add(NAME, new, commit="c" * 40)
        failing = Failing(getattr(os, call), nth, code)
        with monkeypatch.context() as patch, contextlib.suppress(OSError):
            patch.setattr(os, call, failing)
            get()
        if not failing.failed:
            break
        assert models(ft_home) == ["org--name"]
        assert same(folder, old) or same(folder, new)
        assert same(get().path, new)
    assert same(folder, new)
    assert models(ft_home) == ["org--name"]
    assert nth > 1 or call == "fdatasync", "the call is not made at all"


class Failing:
    """The n-th call of a system call fails."""

    def __init__(self, real: Callable[..., object], nth: int, code: int) -> None:
        self._real, self._left, self._code = real, nth, code
        self.failed = False

    def __call__(self, *arguments: object, **named: object) -> object:
        self._left -= 1
        if self._left:
            return self._real(*arguments, **named)
        self.failed = True
        raise OSError(self._code, os.strerror(self._code))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """40 MB of their own; needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting needs root; the injected failures above stand for it")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_another_program_fills(
    a_hub: Hub, small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftlaunch.cli.errors import report

    monkeypatch.setenv("FT_HOME", str(small_disk))
    old, new = model(1000), model(20 << 20, seed=1)
    a_hub.add(NAME, old)
    get()
    a_hub.add(NAME, new, commit="c" * 40)
    a_hub.cdn.rate = 50e6
    free = os.statvfs(small_disk).f_bavail

    def observe(event: Event) -> None:
        if isinstance(event, Moved) and event.done > 1 << 20 and not (small_disk / "filler").exists():
            filler = (small_disk / "filler").open("wb", buffering=0)
            with filler, contextlib.suppress(OSError):
                while filler.write(b"x" * (1 << 16)):
                    pass

    monkeypatch.setattr("ftlaunch.store.fetch.check_disk", lambda path, free, needed: None)
    with pytest.raises(OSError, match="space") as caught:
        fetch(NAME, HubName(NAME), Wishes(), observe, QUICK)
    assert report(caught.value) == 1
    assert "no space is left" in capsys.readouterr().err
    assert same(small_disk / "models" / "org--name", old)
    (small_disk / "filler").unlink()
    assert os.statvfs(small_disk).f_bavail == free
    seen: list[Event] = []
    a_hub.cdn.rate = 0
    assert same(get(seen=seen).path, new)
    assert next(event for event in seen if isinstance(event, Planned)).present < 1000
