"""What lies in the folder of kept prompts, and removing it, for commands: beside running servers, without their locks.

A server does not mind: a file that vanishes is a record less. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ftengine.cache.tiers.files import Folder
from ftengine.cache.tiers.format import MAX_HEADER, NAME, START, Header
from ftengine.cache.tiers.identity import KEY_FILE, Identity, key_folders, read_identity


@dataclass(frozen=True)
class Kept:
    """The records of one identity. identity: None where it is not readable.

    used, made: seconds since the epoch, of the record used last and of the oldest; 0: there are none.
    """

    key: str
    identity: Identity | None
    records: int
    bytes: int
    used: float
    made: float
    sessions: int


def survey(root: Path) -> list[Kept]:
    """Of every identity, the last used one first. Follows no link in the folder. Raises OSError; nothing if there is
    no such folder."""
    if not root.is_dir():
        return []
    with contextlib.closing(Folder.at(root)) as folder:
        found = [_look(folder, name) for name in key_folders(folder)]
    return sorted((kept for kept in found if kept is not None), key=lambda kept: -kept.used)


def clear(root: Path, keys: Iterable[str] | None = None) -> int:
    """Removes the records of these identities, or of all; the bytes that are free now. Raises OSError."""
    if not root.is_dir():
        return 0
    freed = 0
    with contextlib.closing(Folder.at(root)) as folder:
        for name in key_folders(folder):
            if keys is None or name in keys:
                freed += _empty(folder, name)
    return freed


def _look(root: Folder, key: str) -> Kept | None:
    try:
        folder = root.child(key)
    except OSError:
        return None
    with contextlib.closing(folder):
        identity = None
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            identity = read_identity(folder)
        entries = folder.entries()
        records = [entry for entry in entries if NAME.fullmatch(entry.name)]
        sessions = {session for entry in records if (session := _session(folder, entry.name))}
    times = [entry.modified for entry in records] or [0.0]
    size = sum(entry.size for entry in entries)
    return Kept(key, identity, len(records), size, max(times), min(times), len(sessions))


def _session(folder: Folder, name: str) -> str:
    """Whose a record is, unchecked; "" if it does not tell."""
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
        start = folder.read(name, START.size + MAX_HEADER)
        _, length, _ = START.unpack_from(start.ljust(START.size, b"\0"))
        return msgspec.msgpack.decode(start[START.size : START.size + length], type=Header).session
    return ""


def _empty(root: Folder, key: str) -> int:
    freed = 0
    try:
        folder = root.child(key)
    except OSError:
        return 0
    with contextlib.closing(folder):
        for entry in sorted(folder.entries(), key=lambda entry: entry.name == KEY_FILE):
            folder.remove(entry.name)
            freed += entry.size
        for name in os.listdir(folder.fd):  # noqa: PTH208 - links and the like; Path knows no descriptors
            with contextlib.suppress(OSError):
                folder.remove(name)
    root.remove_folder(key)
    return freed
