"""Folders and GGUF files of this machine, taken into the store."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from ftengine.errors import FtError
from ftlaunch.store import manifest, resolve
from ftlaunch.store.pull import pull
from ftlaunch.store.wishes import Wishes
from tests.store.hubs import digest, models, same
from tests.store.models import model


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def gguf(number: int) -> bytes:
    """A sound file that holds one number and no tensor."""
    key = b"split.no"
    return struct.pack("<4sIQQ Q8s IH", b"GGUF", 3, 0, 1, len(key), key, 2, number)


def test_a_folder_is_copied_with_its_hashes_and_without_code(ft_home: Path, tmp_path: Path) -> None:
    files = model(1 << 20, 1000)
    mine = write(tmp_path / "mine", {**files, "modeling.py": b"", "pytorch_model.bin": b""})
    pulled = pull(str(mine))
    assert pulled.fetched
    assert pulled.path == ft_home / "models" / "mine" == resolve("mine")
    assert same(pulled.path, files)
    written = manifest.read(pulled.path)
    assert written is not None
    assert written.source == manifest.Source("directory", str(mine))
    assert {name: record.sha256 for name, record in written.files.items()} == {n: digest(c) for n, c in files.items()}
    assert os.stat(mine / "config.json").st_nlink == 1, "a later edit would change the store's copy"
    assert models(ft_home) == ["mine"]


def test_a_gguf_file_with_its_other_parts(ft_home: Path, tmp_path: Path) -> None:
    parts = {f"m-0000{n}-of-00002.gguf": gguf(n) for n in (1, 2)}
    folder = write(tmp_path / "mine", parts)
    assert pull(str(folder / "m-00002-of-00002.gguf")).path == ft_home / "models" / "m" / "m-00001-of-00002.gguf"
    assert same(ft_home / "models" / "m", parts)
    (folder / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(FtError, match=r"m-00001-of-00002\.gguf is missing"):
        pull(str(folder / "m-00002-of-00002.gguf"))


def test_a_damaged_gguf_file_is_not_taken(ft_home: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", {"m.gguf": gguf(1)[:-1]})
    with pytest.raises(FtError, match="not a sound GGUF file"):
        pull(str(folder / "m.gguf"))
    assert models(ft_home) == []


def test_a_disk_that_is_too_small_keeps_nothing(ft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = write(tmp_path / "mine", model(1000))
    full = list(os.statvfs(tmp_path))
    full[4] = 0  # f_bavail
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(full))
    with pytest.raises(FtError, match="are free"):
        pull(str(mine))
    assert models(ft_home) == []


def test_another_model_of_that_name_is_not_replaced(ft_home: Path, tmp_path: Path) -> None:
    first = write(tmp_path / "mine", model(1000))
    pull(str(first))
    (tmp_path / "other").mkdir()
    second = write(tmp_path / "other" / "mine", model(1000, seed=2))
    with pytest.raises(FtError, match="is another model"):
        pull(str(second))
    assert pull(str(first)).fetched
    assert pull(str(second), wishes=Wishes(to=tmp_path / "copy")).path == tmp_path / "copy"


@pytest.mark.parametrize("harm", ["cut", "empty", "pipe"])
def test_what_is_no_sound_model_is_not_taken(ft_home: Path, tmp_path: Path, harm: str) -> None:
    folder = write(tmp_path / "mine", model(1000))
    if harm == "cut":
        os.truncate(folder / "model-00001-of-00001.safetensors", 700)
    elif harm == "empty":
        (folder / "config.json").unlink()
    else:
        (folder / "model-00001-of-00001.safetensors").unlink()
        os.mkfifo(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(FtError):
        pull(str(folder))
    assert models(ft_home) == []
