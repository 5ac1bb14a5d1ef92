"""Modes of folders that ft makes, against the file system, under umasks that give more and less than is meant."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftengine.private import owner_writes, private_folder


@pytest.fixture(params=[0o000, 0o022, 0o377])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_folder_that_is_made_is_the_users_own(umask: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o751)
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    made = private_folder(there / "one" / "two" / "three")
    assert made == there / "one" / "two" / "three"
    assert [mode(path) for path in (made, made.parent, made.parent.parent)] == [0o700] * 3
    assert (mode(there), mode(tmp_path)) == (0o755, 0o751), "what was there stays as it is"
    assert private_folder(made) == made


def test_others_do_not_write_to_what_is_made_meanwhile(umask: int, tmp_path: Path) -> None:
    """And read what the umask lets them; afterwards it is what it was, also after an exception."""

    def fail() -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
        raise KeyError

    with pytest.raises(KeyError), owner_writes():
        fail()
    assert mode(tmp_path / "folder") == 0o755 & ~umask
    assert mode(tmp_path / "file") == 0o644 & ~umask
    assert os.umask(umask) == umask


def test_a_file_or_a_dead_link_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/below", "link", "link/below"):
        with pytest.raises(OSError, match=name.partition("/")[0]):
            private_folder(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()
