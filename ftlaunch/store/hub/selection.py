"""Which files of a repository make a model.

By an allow-list: weights as safetensors or GGUF, and the texts and tables beside them. Pickle files can run code when
they are read, and Python files are code: neither is ever fetched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from ftengine.errors import FtError
from ftlaunch.store.filenames import clash, is_safe, shown
from ftlaunch.store.hub.errors import HubError
from ftlaunch.store.hub.repository import RemoteFile, Repository

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_TEXT = 128 << 20  # a tokenizer.json of a large vocabulary has 35 MB
MAX_INDEX = 64 << 20
TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "README.md", "USE_POLICY.md")
NO_TEXTS = ("*.index.json", "requirements*.txt")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CODE = (".py", ".so", ".sh", ".ipynb", ".dll", ".exe")
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
SHOWN = 12

Read = Callable[[RemoteFile], bytes]


def choose(repository: Repository, patterns: Sequence[str], gguf: str, read: Read) -> list[RemoteFile]:
    """The files to fetch, small ones first. `gguf`: the path of the one GGUF file that was asked for, or empty.

    read: fetches a small file, checked. Raises HubError when there is nothing that can be run, or a name is refused.
    """
    files = {file.path: file for file in repository.files}
    if gguf:
        chosen = _gguf(repository, files, gguf)
    elif patterns:
        chosen = _matching(repository, files, patterns)
    else:
        chosen = _model(repository, files, read)
    refused = next((file.path for file in chosen if not is_safe(file.path)), None) or clash(f.path for f in chosen)
    if refused is not None:
        raise HubError(f"{repository.name} holds a file named {shown(refused)}, which is refused", "ft list")
    return sorted(chosen, key=lambda file: (is_weight(file.path), file.path))


def is_weight(path: str) -> bool:
    return path.lower().endswith((".safetensors", ".gguf"))


def _model(repository: Repository, files: dict[str, RemoteFile], read: Read) -> list[RemoteFile]:
    weights = _safetensors(repository, files, read)
    if weights:
        return weights + _texts(files)
    variants = _variants(files)
    if len(variants) == 1:
        return next(iter(variants.values()))
    if variants:
        raise _choice(repository, variants)
    pickle = next((path for path in files if path.lower().endswith(PICKLES)), None)
    if pickle is not None:
        raise HubError(
            f"{repository.name} has its weights as pickle ({shown(pickle)}) only, which can run code when it is read; "
            "ft needs safetensors or GGUF",
            f"look for another form of this model at {repository.endpoint}/models",
        )
    raise HubError(
        f"{repository.name} holds no safetensors and no GGUF file", f"look at {repository.endpoint}/{repository.name}"
    )


def _safetensors(repository: Repository, files: dict[str, RemoteFile], read: Read) -> list[RemoteFile]:
    if INDEX in files:
        shards = _shards(repository, read(_small(repository, files[INDEX], MAX_INDEX)))
        missing = next((shard for shard in shards if shard not in files), None)
        if missing is not None:
            raise HubError(f"{repository.name} lacks its file {shown(missing)}, which {INDEX} names", "ft list")
        return [files[INDEX], *(files[shard] for shard in shards)]
    if SINGLE in files:
        return [files[SINGLE]]
    return [file for path, file in files.items() if "/" not in path and path.lower().endswith(".safetensors")]


def _shards(repository: Repository, index: bytes) -> list[str]:
    try:
        weight_map: Any = msgspec.json.decode(index).get("weight_map")
        shards = sorted(set(weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError, TypeError):
        shards = []
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise HubError(f"{INDEX} of {repository.name} makes no sense", "ft list")
    bad = next((shard for shard in shards if not is_safe(shard) or "/" in shard or not is_weight(shard)), None)
    if bad is not None:
        raise HubError(f"{INDEX} of {repository.name} names the file {shown(bad)}, which is refused", "ft list")
    return shards


def _texts(files: dict[str, RemoteFile]) -> list[RemoteFile]:
    return [file for path, file in files.items() if "/" not in path and is_text(path) and file.size <= MAX_TEXT]


def is_text(path: str) -> bool:
    if path.startswith(".") or path.lower().endswith((*PICKLES, *CODE)):
        return False
    return any(fnmatchcase(path, pattern) for pattern in TEXTS) and not any(fnmatchcase(path, p) for p in NO_TEXTS)


def _matching(repository: Repository, files: dict[str, RemoteFile], patterns: Sequence[str]) -> list[RemoteFile]:
    chosen = {path: file for path, file in files.items() if any(fnmatchcase(path, pattern) for pattern in patterns)}
    refused = next((path for path in chosen if path.lower().endswith((*PICKLES, *CODE))), None)
    if refused is not None:
        raise HubError(f"{shown(refused)} is pickle or code, which ft never fetches", "a narrower --files")
    if not chosen:
        raise HubError(
            f"no file of {repository.name} matches {' '.join(map(shown, patterns))}",
            f"look at {repository.endpoint}/{repository.name}/tree/{repository.commit[:12]}",
        )
    ggufs = _variants(chosen)
    if len(ggufs) > 1:
        raise _choice(repository, ggufs)
    if ggufs:
        return next(iter(ggufs.values()))
    return list({file.path: file for file in [*chosen.values(), *_texts(files)]}.values())


def _gguf(repository: Repository, files: dict[str, RemoteFile], path: str) -> list[RemoteFile]:
    variants = _variants(files)
    for same in (lambda part: part.path == path, lambda part: part.path.rpartition("/")[2] == path):
        found = [parts for parts in variants.values() if any(map(same, parts))]
        if len(found) == 1:
            return found[0]
    if variants:
        raise _choice(repository, variants)
    raise HubError(f"{repository.name} holds no file {shown(path)}", f"ft pull {repository.name}")


def _variants(files: dict[str, RemoteFile]) -> dict[str, list[RemoteFile]]:
    """The GGUF models among `files`: by the path of the first part, all parts. Projectors of images are no models."""
    variants: dict[str, list[RemoteFile]] = {}
    for path, file in sorted(files.items()):
        name = path.rpartition("/")[2].lower()
        if name.endswith(".gguf") and not name.startswith(("mmproj", "imatrix")):
            match = PART.fullmatch(path)
            first = f"{match[1]}-00001-of-{match[3]}.gguf" if match else path
            variants.setdefault(first, []).append(file)
    return variants


def _choice(repository: Repository, variants: dict[str, list[RemoteFile]]) -> HubError:
    sizes = {path: sum(part.size for part in parts) for path, parts in variants.items()}
    listed = [f"{shown(path)} ({size / 1e9:.1f} GB)" for path, size in list(sizes.items())[:SHOWN]]
    more = f" and {len(sizes) - SHOWN} more" if len(sizes) > SHOWN else ""
    return HubError(
        f"{repository.name} holds several models: {', '.join(listed)}{more}",
        f"ft pull {repository.name}/{shown(next(iter(sizes)))}",
    )


def _small(repository: Repository, file: RemoteFile, limit: int) -> RemoteFile:
    if file.size > limit:
        raise FtError(f"{file.path} of {repository.name} has {file.size} bytes, {limit} are allowed", "ft list")
    return file
