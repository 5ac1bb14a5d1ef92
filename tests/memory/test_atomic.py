"""Files written in one step, against a kernel that refuses: crashes, limits, failing calls, other writers, modes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftengine.atomic import write_atomically

OLD, NEW = b"old", b"new" * 100_000
WRITER = """
import sys
from pathlib import Path
from ftengine.atomic import write_atomically

write_atomically(Path(sys.argv[1]), b"a" * (1 << 20), sync=True)
print(flush=True)
while True:
    for letter in (b"b", b"a"):
        write_atomically(Path(sys.argv[1]), letter * (1 << 20))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.json"
    path.write_bytes(OLD)
    return path


@pytest.fixture(params=[0o000, 0o022, 0o377])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def untouched(path: Path) -> None:
    """What it held it holds, and nothing lies beside it."""
    assert path.read_bytes() == OLD
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("data", [b"", NEW])
@pytest.mark.parametrize("sync", [False, True])
def test_all_of_it_is_there_and_no_draft(file: Path, data: bytes, sync: bool) -> None:
    write_atomically(file, data, sync=sync)
    write_atomically(file.with_name("other"), data, sync=sync)
    assert {path.name: path.read_bytes() for path in file.parent.iterdir()} == {"a.json": data, "other": data}


def test_modes(umask: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"")
    assert mode(path) == 0o666 & ~umask, "as any new file"
    for before, after in ((0o640, 0o640), (0o664, 0o664), (0o000, 0o600), (0o4755, 0o755)):
        path.chmod(before)
        write_atomically(path, b"")
        assert mode(path) == after
        write_atomically(path, b"", mode=0o600)
        assert mode(path) == 0o600, "as is said, whatever it had"
    write_atomically(tmp_path / "private", b"", mode=0o600)
    assert mode(tmp_path / "private") == 0o600


def test_a_link_is_replaced_and_not_followed(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    write_atomically(link, NEW)
    assert not link.is_symlink()
    assert (link.read_bytes(), file.read_bytes()) == (NEW, OLD)


@pytest.mark.parametrize(("of", "call"), [(os, "open"), (os, "fsync"), (Path, "replace")])
@pytest.mark.parametrize(
    ("trouble", "kind"), [(OSError(errno.ENOSPC, "full"), OSError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_call_that_fails(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    of: object,
    call: str,
    trouble: BaseException,
    kind: type[BaseException],
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        raise trouble

    with monkeypatch.context() as patch, pytest.raises(kind) as caught:  # noqa: PT012 - os.open is pytest's, too
        patch.setattr(of, call, fails)
        write_atomically(file, NEW, sync=True)
    untouched(file)
    if isinstance(caught.value, OSError):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(file))


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_that_may_not_grow(file: Path, sync: bool) -> None:
    """The kernel itself ends the write in the middle, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(OSError, match=r"a\.json") as caught:  # noqa: PT012 - what fails is inside
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            write_atomically(file, NEW, sync=sync)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    untouched(file)


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "a.json"
    folder.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(folder, NEW)
    assert caught.value.filename == str(folder)
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "nowhere" / "a.json", NEW)


def test_its_data_are_on_the_disk_before_its_name_leads_to_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(fd: int) -> None:
        calls.append(("fsync", os.fstat(fd).st_size))
        fsync(fd)

    def replaced(draft: Path, path: Path) -> Path:
        calls.append(("replace", draft.stat().st_size))
        return replace(draft, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_atomically(file, NEW, sync=True)
    assert calls == [("fsync", len(NEW)), ("replace", len(NEW))]
    calls.clear()
    write_atomically(file, NEW)
    assert calls == [("replace", len(NEW))]


def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """At any moment: the file is one of those that it wrote, and what the crash left is in nobody's way."""
    path = tmp_path / "a"
    for number in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            threading.Event().wait(number * 0.003)
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        data = path.read_bytes()
        assert data in (b"a" * (1 << 20), b"b" * (1 << 20))
    write_atomically(path, NEW)
    assert path.read_bytes() == NEW


def test_writers_at_the_same_time(tmp_path: Path) -> None:
    """Threads of one process too: none of them takes another's draft for its own."""
    path, over = tmp_path / "a", threading.Event()
    contents = {letter * (1 << 18) for letter in (b"a", b"b", b"c", b"d")}
    troubles: list[Exception] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(25):
                write_atomically(path, data)
        except Exception as error:
            troubles.append(error)

    def read() -> None:
        while not over.is_set():
            if path.read_bytes() not in contents:
                troubles.append(AssertionError("half of a file"))
                return

    write_atomically(path, next(iter(contents)))
    writers = [threading.Thread(target=write, args=(data,)) for data in contents]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    over.set()
    reader.join()
    assert troubles == []
    assert list(tmp_path.iterdir()) == [path]
