"""Reads a model folder's files as the untrusted input they are: regular files of bounded size inside the folder.

Torch-free. Every failure is a CheckpointError that names the file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ftengine.errors import CheckpointError

MEBIBYTE = 1 << 20


class ModelFiles(Protocol):
    """The small files of a model by name, wherever they come from. None: there is no such file."""

    def json(self, name: str, limit: int) -> dict[str, Any] | None: ...

    def text(self, name: str, limit: int) -> str | None: ...

    def content(self, name: str, limit: int) -> bytes | None: ...


def locate(folder: Path, name: str) -> Path | None:
    """The regular file `name` of `folder`, or None if there is no such entry.

    A symbolic link is followed only inside the folder, or where the Hugging Face cache keeps what its
    `snapshots/<revision>/` folders link to: the `blobs/` folder beside `snapshots/`.
    """
    path = folder / name
    try:
        linked = path.is_symlink()
        if not linked and not path.exists():
            return None
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is a symbolic link to a file that does not exist") from None
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if linked and not any(target.is_relative_to(root) for root in _link_roots(folder)):
        raise CheckpointError(f"{path} is a symbolic link that leads out of the model folder, to {target}")
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    return target


def _link_roots(folder: Path) -> list[Path]:
    root = folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    return roots


def open_regular(path: Path) -> int:
    """A read-only file descriptor of a regular file; never blocks on a pipe that took its place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return descriptor


def read_bytes(folder: Path, name: str, limit: int) -> bytes | None:
    """The whole file, or None if it is absent. Raises CheckpointError above `limit` bytes."""
    path = locate(folder, name)
    if path is None:
        return None
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise CheckpointError(f"{folder / name} is larger than {limit // MEBIBYTE} MiB")
    return content


def read_text(folder: Path, name: str, limit: int) -> str | None:
    content = read_bytes(folder, name, limit)
    if content is None:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{folder / name} is not UTF-8 text") from None


def read_json_object(folder: Path, name: str, limit: int) -> dict[str, Any] | None:
    """A JSON object, or None if the file is absent."""
    content = read_bytes(folder, name, limit)
    if content is None:
        return None
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{folder / name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder / name} does not hold a JSON object")
    return value


class FolderFiles:
    """Fulfils ModelFiles from a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def json(self, name: str, limit: int) -> dict[str, Any] | None:
        return read_json_object(self._folder, name, limit)

    def text(self, name: str, limit: int) -> str | None:
        return read_text(self._folder, name, limit)

    def content(self, name: str, limit: int) -> bytes | None:
        return read_bytes(self._folder, name, limit)
