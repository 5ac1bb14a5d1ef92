"""`ft-model.json`: what a model in the store is made of, where it came from, and its files' hashes.

Format 2: {"format": 2, "source": {"kind", "repo", "revision", "requested"}, "files": {name: {"size", "sha256"}},
"created": UTC time}. Format 1, which the demo was once written with, has a recipe and sizes, and is still read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from ftengine.atomic import write_atomically

NAME = "ft-model.json"
MAX_BYTES = 16 << 20

Kind = Literal["hub", "gguf", "directory", "recipe"]


@dataclass(frozen=True)
class Source:
    """kind: a repository of the Hub, a GGUF file, a directory, or a recipe of the catalogue."""

    kind: Kind
    repo: str  # org/name; the path of a file or directory; a recipe's version
    revision: str = ""  # the commit; empty when the source has none
    requested: str = ""  # what was asked for: a branch, a tag, a short name


@dataclass(frozen=True)
class File:
    size: int  # bytes
    sha256: str = ""  # lower-case hexadecimal; empty when no hash was recorded


@dataclass(frozen=True)
class Manifest:
    """files: by their path below the model's directory, with `/` between its parts."""

    source: Source
    files: dict[str, File]
    created: str = ""  # ISO 8601, UTC


def write(directory: Path, source: Source, files: Mapping[str, File]) -> None:
    """Record what `directory` consists of. The record is on the disk, whole, when this returns."""
    content = {
        "format": 2,
        "source": asdict(source),
        "files": {name: asdict(files[name]) for name in sorted(files)},
        "created": _now(),
    }
    path = directory / NAME
    try:
        write_atomically(path, (json.dumps(content, indent=2) + "\n").encode(), sync=True)
    except OSError as error:  # where `directory` leads through a descriptor, its path tells a person nothing
        raise OSError(error.errno, error.strerror, str(directory.resolve() / NAME)) from error


def hash_files(directory: Path) -> dict[str, File]:
    """Every regular file below `directory`, read to the end: what to record of a model that was made here."""
    from ftlaunch.store.files import sha256

    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if name != NAME and path.is_file() and not path.is_symlink():
            found[name] = File(path.stat().st_size, sha256(path))
    return found


def read(directory: Path) -> Manifest | None:
    """None for a record that is missing or makes no sense; names that lead out of the directory make none."""
    try:
        with (directory / NAME).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        return _decode(json.loads(raw)) if len(raw) <= MAX_BYTES else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_complete(directory: Path, recipe: str) -> bool:
    """Whether the model was made by `recipe` and every file is there in its full size. Reads no weights."""
    written = read(directory)
    if written is None or (written.source.kind, written.source.repo) != ("recipe", recipe):
        return False
    return all(_size(directory / name) == file.size for name, file in written.files.items())


def damaged(directory: Path) -> str | None:
    """The first recorded file that is missing or cut short; None when all are there or no record tells."""
    written = read(directory)
    if written is None:
        return None
    return next((name for name, file in written.files.items() if _size(directory / name) < file.size), None)


def _decode(content: Any) -> Manifest:
    """Raises ValueError, KeyError, TypeError or AttributeError."""
    version = content["format"]
    if version == 1:
        source = Source("recipe", str(content["recipe"]))
        return Manifest(source, _files({name: {"size": size} for name, size in content["files"].items()}))
    if version != 2:
        raise ValueError(f"format {version!r}")
    given = content["source"]
    if given["kind"] not in get_args(Kind):
        raise ValueError("an unknown kind of source")
    texts = {key: str(given.get(key, "")) for key in ("repo", "revision", "requested")}
    return Manifest(Source(given["kind"], **texts), _files(content["files"]), str(content.get("created", "")))


def _files(given: dict[str, Any]) -> dict[str, File]:
    files = {}
    for name in sorted(given):
        if not is_inside(name):
            raise ValueError("a name that leads out of the directory")
        size = given[name]["size"]
        if type(size) is not int or size < 0:
            raise ValueError("a size that is none")
        files[name] = File(size, str(given[name].get("sha256", "")).lower())
    return files


def is_inside(name: str) -> bool:
    """Whether a recorded name stays below its directory: relative, plain parts only."""
    parts = PurePosixPath(name).parts
    return name == "/".join(parts) and bool(parts) and ".." not in parts and parts[0] != "/" and "\0" not in name


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except (OSError, ValueError):  # longer than a name can be, or not to be spelled on this file system
        return -1


def _now() -> str:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc).isoformat(timespec="seconds")
