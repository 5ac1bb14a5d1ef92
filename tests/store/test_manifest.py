"""ft-model.json: written and read back, format 1, and records that lie."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ftlaunch.store import manifest
from tests.store import small_models


def test_round_trip(tmp_path: Path) -> None:
    folder = small_models.write(tmp_path / "m")
    (folder / "sub").mkdir()
    (folder / "sub" / "x").write_bytes(b"abc")
    (folder / "link").symlink_to("/etc/passwd")
    source = manifest.Source("hub", "org/name", small_models.COMMIT, "main")
    files = manifest.hash_files(folder)
    assert files["sub/x"] == manifest.File(3, hashlib.sha256(b"abc").hexdigest())
    assert set(files) == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "sub/x"}
    manifest.write(folder, source, files)
    read = manifest.read(folder)
    assert read is not None
    assert (read.source, read.files) == (source, files)
    assert read.created.endswith("+00:00")
    assert not list(folder.glob(".ft-model*"))
    assert manifest.damaged(folder) is None
    (folder / "sub" / "x").write_bytes(b"ab")
    assert manifest.damaged(folder) == "sub/x"


def test_format_1_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / manifest.NAME).write_text(json.dumps({"format": 1, "recipe": "demo-1-x", "files": {"a": 5}}))
    read = manifest.read(tmp_path)
    assert read == manifest.Manifest(manifest.Source("recipe", "demo-1-x"), {"a": manifest.File(5)})
    assert manifest.is_complete(tmp_path, "demo-1-x")
    assert not manifest.is_complete(tmp_path, "demo-2-x")
    (tmp_path / "a").write_bytes(b"123456")
    assert not manifest.is_complete(tmp_path, "demo-1-x")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 3, "source": {"kind": "hub"}, "files": {}}',
        '{"format": 2, "source": {"kind": "torrent"}, "files": {}}',
        '{"format": 2, "source": {"kind": "hub"}, "files": {"../x": {"size": 1}}}',
        '{"format": 2, "source": {"kind": "hub"}, "files": {"/etc/passwd": {"size": 1}}}',
        '{"format": 2, "source": {"kind": "hub"}, "files": {"a//b": {"size": 1}}}',
        '{"format": 2, "source": {"kind": "hub"}, "files": {"": {"size": 1}}}',
        '{"format": 1, "recipe": "x", "files": {"a/../../b": 1}}',
        "[" * 100_000,
    ],
)
def test_records_that_make_no_sense(content: str, tmp_path: Path) -> None:
    (tmp_path / manifest.NAME).write_text(content)
    assert manifest.read(tmp_path) is None
    assert manifest.damaged(tmp_path) is None
    assert not manifest.is_complete(tmp_path, "x")


def test_a_full_disk_gives_downloads_back(ft_home: Path) -> None:
    """What was fetched so far is kept after every other error, and not where it is what fills the disk."""
    import errno

    from ftlaunch.store.install import site

    for code, kept in ((errno.ECONNRESET, True), (errno.ENOSPC, False), (errno.EIO, False)):
        with pytest.raises(OSError, match="injected"), site("x") as here:  # noqa: PT012 - what fails is inside
            here.downloads.mkdir(exist_ok=True)
            (here.downloads / "part").touch()
            raise OSError(code, "injected")
        assert here.downloads.exists() == kept
