"""The disk that models are stored on: what it is, and how much of it is free."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ftlaunch import paths
from ftlaunch.machine.probe import Asked
from ftlaunch.machine.system import System
from ftlaunch.machine.verdict import Finding

GB = 10**9
LITTLE, SMALL = GB, 20 * GB  # free bytes: the demo model; a model of use
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "drvfs", "virtiofs", "glusterfs", "ceph", "lustre")
MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Mount:
    point: str
    type: str  # of the file system
    source: str


def probe(asked: Asked) -> Iterator[Finding]:
    system = System()
    yield home()
    yield kind(system, nearest(paths.models()))
    yield space(nearest(paths.models()))


def nearest(path: Path) -> Path:
    """The path, or the first folder above it that is there."""
    return next((folder for folder in (path, *path.parents) if _is_folder(folder)), Path("/"))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # it lies in a folder of someone else's
        return False


def home() -> Finding:
    """Whether ft can write where it keeps its files; nothing is written to find out."""
    folder = paths.home()
    there, exists = nearest(folder), _is_folder(folder)
    # A file, or a link to nothing, keeps the folder from being made.
    obstacle = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), there)
    in_the_way = not _is_folder(obstacle)
    writable = os.access(there, os.W_OK | os.X_OK) and not os.statvfs(there).f_flag & os.ST_RDONLY
    data = {"path": str(folder), "exists": exists, "writable": writable and not in_the_way}
    if data["writable"]:
        value = str(folder) if exists else f"{folder}, made when it is needed"
        return Finding("disk.home", "ft's folder", value, data=data)
    value = f"{obstacle} is not a folder" if in_the_way else f"{folder} cannot be written to"
    cost = "ft pull, serve and launch write there"
    mend = "set FT_HOME to a folder of yours on a disk that can be written to"
    return Finding("disk.home", "ft's folder", value, "bad", cost, mend, data)


def kind(system: System, folder: Path) -> Finding:
    mount = mount_of(system, folder)
    if mount is None:
        return Finding("disk.kind", "type", "not told by the system", data={"filesystem": None, "kind": None})
    what = _kind(system, mount)
    data = {"filesystem": mount.type, "source": mount.source, "mount": mount.point, "kind": what}
    device = f" ({mount.source})" if mount.source.startswith("/dev/") else ""
    value = f"{what}, {mount.type}{device}" if what != mount.type else f"{what}{device}"
    if mount.type in NETWORK:
        cost = "models load as slowly as it answers"
        mend = "on WSL 2 keep models under /home, not /mnt; else FT_HOME on a disk of this machine"
        return Finding("disk.kind", "type", value, "warn", cost, mend, data)
    if mount.type in MEMORY:
        cost = "models take memory twice, and are gone with the next start"
        return Finding("disk.kind", "type", value, "warn", cost, "FT_HOME on a disk", data)
    if what == "hard disk":
        cost = "some 150 MB/s: a model of 20 GB takes two minutes to load"
        return Finding("disk.kind", "type", value, "warn", cost, "FT_HOME on an SSD", data)
    if mount.type == "overlay":
        cost = "models are gone with the container"
        return Finding("disk.kind", "type", value, "note", cost, "docker run -v ft:/ft -e FT_HOME=/ft", data)
    return Finding("disk.kind", "type", value, data=data)


def space(folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    data = {"total": usage.total, "free": usage.free}
    value = f"{usage.free / GB:.0f} of {usage.total / GB:.0f} GB"
    finding = Finding("disk.free", "free", value, data=data)
    mend = "free some (ft list shows models, ft rm removes one), or FT_HOME on another disk"
    if usage.free < LITTLE:
        return finding.but("bad", "no model can be fetched", mend)
    return finding.but("warn", "models of use are larger", mend) if usage.free < SMALL else finding


def mount_of(system: System, folder: Path) -> Mount | None:
    """The mount that a folder lies on, from /proc/self/mountinfo (proc(5)); where there is none, as psutil sees it."""
    mounts = []
    for line in system.text("proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) >= 5 and len(rest) >= 2:
            mounts.append(Mount(_plain(fields[4]), rest[0], _plain(rest[1])))
    if not mounts:
        import psutil

        mounts = [Mount(part.mountpoint, part.fstype, part.device) for part in psutil.disk_partitions(all=True)]
    path = folder.resolve()
    above = [mount for mount in mounts if path.is_relative_to(mount.point)]
    # Of two at one place the later one is on top.
    return max(enumerate(above), key=lambda item: (len(item[1].point), item[0]))[1] if above else None


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


def _kind(system: System, mount: Mount) -> str:
    if not mount.source.startswith("/dev/"):
        return {"overlay": "layers of a container"}.get(mount.type, mount.type)
    name = _disk(system, Path(os.path.realpath(system.path(mount.source[1:]))).name)
    if name.startswith("nvme"):
        return "NVMe"
    if name.startswith(("vd", "xvd")) or system.wsl:  # what is below them is not told
        return "virtual disk"
    rotates = system.number(f"sys/block/{name}/queue/rotational")
    return "disk" if rotates is None else "hard disk" if rotates else "SSD"


def _disk(system: System, name: str) -> str:
    """The disk below partitions, LVM, encryption and RAID: the first of several."""
    for _ in range(8):
        below = system.names(f"sys/class/block/{name}/slaves", "*")
        if below:
            name = Path(below[0]).name
        elif system.text(f"sys/class/block/{name}/partition"):
            name = system.path(f"sys/class/block/{name}").resolve().parent.name
        else:
            break
    return name
