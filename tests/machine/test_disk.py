"""The store's disk: what it is by mountinfo and sysfs, what is free, and reading it past the page cache."""

from __future__ import annotations

import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from ftlaunch.machine import disk, disk_read
from ftlaunch.machine.disk import Mount

MOUNTS = """22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/{root} rw
30 22 0:30 / {point} rw shared:9 - {type} {source} rw
31 22 0:31 / /elsewhere rw - tmpfs tmpfs rw
"""
KINDS = [
    # file system, source, files below sys, kind, verdict
    ("ext4", "/dev/nvme0n1p2", {}, "NVMe", "ok"),
    ("xfs", "/dev/sda1", {"class/block/sda1/partition": "1", "block/sda/queue/rotational": "0"}, "SSD", "ok"),
    ("ext4", "/dev/sda1", {"class/block/sda1/partition": "1", "block/sda/queue/rotational": "1"}, "hard disk", "warn"),
    ("ext4", "/dev/dm-0", {"class/block/dm-0/slaves/nvme1n1/x": ""}, "NVMe", "ok"),
    ("ext4", "/dev/vdb", {"block/vdb/queue/rotational": "1"}, "virtual disk", "ok"),
    ("nfs4", "server:/export", {}, "nfs4", "warn"),
    ("9p", "C:\\134", {}, "9p", "warn"),
    ("tmpfs", "tmpfs", {}, "tmpfs", "warn"),
    ("overlay", "overlay", {}, "layers of a container", "note"),
]


@pytest.mark.parametrize(("type", "source", "files", "kind", "verdict"), KINDS)
def test_kinds(tree, tmp_path: Path, type: str, source: str, files: dict[str, str], kind: str, verdict: str) -> None:
    folder = tmp_path / "a store" / "models"
    folder.mkdir(parents=True)
    point = str(folder.parent).replace(" ", "\\040")
    text = MOUNTS.format(root="sdz1", point=point, type=type, source=source)
    system = tree({"proc/self/mountinfo": text, **{f"sys/{name}": content for name, content in files.items()}})
    if "class/block/sda1/partition" in files:  # as the kernel has it: a link into the disk's own folder
        real = system.path("sys/devices/pci/block/sda/sda1")
        real.parent.mkdir(parents=True)
        shutil.move(system.path("sys/class/block/sda1"), real)
        system.path("sys/class/block/sda1").symlink_to(real)
    found = disk.kind(system, folder)
    assert found.data["kind"] == kind
    assert found.data["mount"] == str(folder.parent)
    assert found.verdict == verdict
    assert bool(found.mend) == (verdict != "ok")


def test_the_mount_of_this_folder(tmp_path: Path) -> None:
    """Against what the system itself says of it."""
    found = disk.mount_of(disk.System(), tmp_path)
    assert isinstance(found, Mount)
    assert os.stat(found.point).st_dev == tmp_path.stat().st_dev
    assert os.path.ismount(found.point)


@pytest.mark.parametrize(("free", "verdict"), [(500e9, "ok"), (20e9, "ok"), (5e9, "warn"), (0.5e9, "bad"), (0, "bad")])
def test_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, verdict: str) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, int(free)))
    assert disk.space(tmp_path).verdict == verdict


def test_a_home_that_is_not_there_is_not_made(ft_home: Path) -> None:
    found = disk.home()
    assert found.verdict == "ok"
    assert not found.data["exists"]
    assert not ft_home.exists()


def test_a_home_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOME", "/proc/self/ft-home")
    found = disk.home()
    assert found.verdict == "bad"
    assert "FT_HOME" in found.mend


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_home_where_a_file_or_a_link_to_nothing_lies(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mkdir sees it: such a folder can never be made."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("file", "link"):
        monkeypatch.setenv("FT_HOME", str(tmp_path / name / below))
        found = disk.home()
        assert (found.verdict, found.data["writable"]) == ("bad", False)
        assert found.value == f"{tmp_path / name} is not a folder"


@pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT and O_TMPFILE are Linux's")
def test_reading(tmp_path: Path) -> None:
    """Without a model a nameless file is read, which leaves nothing; with one, its largest file."""
    (tmp_path / "models").mkdir()
    found = disk_read.read(tmp_path / "models", quick=True)
    if found.data["bytes_per_second"] is None:
        assert found.value in (
            "not measured: its file system has no reads past the page cache",
            "not measured: there is no model yet to read, and no room to try",
        )
        return
    assert 1e6 < found.data["bytes_per_second"] < 1e12
    assert found.data["file"] is None
    assert list((tmp_path / "models").iterdir()) == []
    model = tmp_path / "models" / "demo"
    model.mkdir()
    for name, size in (("small.safetensors", 1 << 20), ("large.safetensors", disk_read.LEAST_FILE)):
        with (model / name).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    (model / "link.safetensors").symlink_to("/dev/zero")
    found = disk_read.read(tmp_path / "models", quick=True)
    assert found.data["file"] == str(model / "large.safetensors")
    assert found.data["bytes_per_second"] > 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_file_system_without_direct_reads() -> None:
    """It may be measured or not, as newer kernels' tmpfs takes them; it never fails."""
    found = disk_read.read(Path("/dev/shm/ft-none"), quick=True)
    assert (found.data["bytes_per_second"] is None) == found.value.startswith("not measured: ")


def test_a_slow_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_read, "made", lambda folder, size: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(disk_read, "bandwidth", lambda fd, seconds: 120e6)
    found = disk_read.read(tmp_path, quick=False)
    assert found.verdict == "warn"
    assert "takes 167 s" in found.value
