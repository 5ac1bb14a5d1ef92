"""Models that other programs left in the Hugging Face cache, found and used where they lie.

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache - `models--org--name/` with `refs/<branch>`,
`snapshots/<commit>/` of links, and `blobs/` that they lead to. The library is not imported: it takes half a second.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import CheckpointError
from ftengine.weights.files import locate, read_json_object

REPOSITORY = re.compile(r"models--([A-Za-z0-9][A-Za-z0-9._-]{0,95})--([A-Za-z0-9][A-Za-z0-9._-]{0,95})")
COMMIT = re.compile(r"[0-9a-f]{40}")
REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95}){0,3}")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NEEDED = ("config.json", "tokenizer.json")
MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class Cached:
    """repo: org/name. path: the snapshot's directory. bytes: of the files it links to."""

    repo: str
    revision: str
    path: Path
    bytes: int


def root() -> Path:
    """As the library finds it: HF_HUB_CACHE, else HF_HOME/hub, else below the user's cache directory."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def find(repo_id: str, revision: str | None = None) -> Path | None:
    """The complete snapshot of a model; None when there is none. revision: a commit, branch or tag; None: main."""
    name = f"models--{repo_id.replace('/', '--')}"
    if REPOSITORY.fullmatch(name) is None or repo_id.count("/") != 1:
        return None
    folder = root() / name
    commit = _commit(folder, revision or "main")
    if commit is None:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if is_complete(snapshot) else None


def models() -> list[Cached]:
    """Complete snapshots, by name; of a repository the one that main leads to, else the newest."""
    found = []
    try:
        folders = sorted(root().iterdir())
    except OSError:
        return []
    for folder in folders:
        match = REPOSITORY.fullmatch(folder.name)
        snapshot = _best(folder) if match else None
        if match and snapshot is not None:
            found.append(Cached(f"{match[1]}/{match[2]}", snapshot.name, snapshot, _bytes(snapshot)))
    return found


def is_complete(snapshot: Path) -> bool:
    """Whether everything that serving needs is there: configuration, tokenizer, and all safetensors files."""
    try:
        if any(locate(snapshot, name) is None for name in NEEDED):
            return False
        index = read_json_object(snapshot, INDEX, MAX_INDEX_BYTES)
        if index is None:
            return locate(snapshot, SINGLE) is not None
        shards = set(index["weight_map"].values())
        return bool(shards) and all(isinstance(name, str) and locate(snapshot, name) is not None for name in shards)
    except (CheckpointError, KeyError, TypeError, AttributeError, OSError, ValueError):
        return False


def _commit(folder: Path, revision: str) -> str | None:
    if COMMIT.fullmatch(revision):
        return revision
    if REFERENCE.fullmatch(revision) is None or ".." in revision:
        return None
    try:
        with (folder / "refs" / revision).open("r", encoding="ascii") as file:
            commit = file.read(41).strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def _best(folder: Path) -> Path | None:
    main = _commit(folder, "main")
    if main is not None and is_complete(folder / "snapshots" / main):
        return folder / "snapshots" / main
    try:
        snapshots = [path for path in (folder / "snapshots").iterdir() if COMMIT.fullmatch(path.name)]
    except OSError:
        return None
    complete = [path for path in snapshots if is_complete(path)]
    return max(complete, key=lambda path: path.stat().st_mtime, default=None)


def _bytes(snapshot: Path) -> int:
    total = 0
    for path in snapshot.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # a link that leads nowhere
            continue
    return total
