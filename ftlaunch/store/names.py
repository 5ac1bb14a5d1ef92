"""From what a person types after --model to a complete model: a directory, or a GGUF file.

A name is a short one of the catalogue or the store (`demo`, `qwen3-30b-a3b`), a repository of the Hub (`org/name`, a
GGUF file in it as `org/name/file.gguf`, either with `@revision`), or a path. A repository's files lie in the store
under `org--name`: the Hub allows no name with two dashes, so that both spellings mean one model.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import FtError
from ftlaunch import paths
from ftlaunch.store import hf_cache, manifest
from ftlaunch.store.catalogue import CATALOGUE, short_name
from ftlaunch.store.filenames import is_safe, is_safe_part, shown

STORE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
GGUF = ".gguf"
CLOSEST = 3  # names that are told where none is the one that was typed


@dataclass(frozen=True)
class HubName:
    """repo: org/name. gguf: the path of the one file that is meant, or empty. revision: empty for `main`."""

    repo: str
    gguf: str = ""
    revision: str = ""

    @property
    def folder(self) -> str:
        """Of the store."""
        file = self.gguf.rpartition("/")[2]
        return self.repo.replace("/", "--") + (f"--{file}" if file else "")

    @property
    def shown(self) -> str:
        return f"{self.repo}/{self.gguf}" if self.gguf else self.repo


def hub_name(model: str) -> HubName | None:
    """The repository that a name stands for, by the catalogue, by itself, or by its folder in the store."""
    name, _, revision = model.partition("@")
    if revision and (REVISION.fullmatch(revision) is None or ".." in revision):
        return None
    short = short_name(name)
    if short is not None:
        entry = CATALOGUE[short]
        return HubName(entry.repo, "", revision or entry.revision) if entry.repo else None
    if "/" not in name and "--" in name and STORE_NAME.fullmatch(name):
        name = name.replace("--", "/", 2 if name.endswith(GGUF) else 1)
    org, _, rest = name.partition("/")
    repo, _, file = rest.partition("/")
    sound = HUB_NAME.fullmatch(f"{org}/{repo}") and is_safe_part(org) and is_safe_part(repo)
    if not sound or ".." in name or "--" in f"{org}/{repo}" or name.endswith("/"):
        return None
    if file and not (file.lower().endswith(GGUF) and is_safe(file)):
        return None
    return HubName(f"{org}/{repo}", file, revision)


def canonical(model: str) -> str:
    """One spelling for one model: the catalogue's short name, org/name, a name of the store, or an absolute path."""
    if looks_like_path(model):
        return str(Path(os.path.abspath(os.path.expanduser(model))))  # noqa: PTH100, PTH111 - also for odd names
    name, at, revision = model.partition("@")
    short = short_name(name)
    if short is not None and stored_folder(name) is None:
        return short + at + revision
    meant = hub_name(name)
    if meant is None:
        return model
    return (short_name(meant.shown) or meant.shown) + at + revision


def resolve(model: str) -> Path:
    """The directory or GGUF file that holds `model`. Raises FtError with what to do when there is none."""
    if looks_like_path(model):
        return _path(Path(canonical(model)), model)
    folder = stored_folder(model)
    if folder is not None:
        _check(model, folder)
        return weights_path(folder)
    meant = hub_name(model)
    if meant is not None and not meant.gguf:
        cached = hf_cache.find(meant.repo, meant.revision or None)
        if cached is not None:
            return cached
    if meant is not None or short_name(model) is not None:
        raise FtError(f"the model {shown(model)} is not in the store yet", f"ft pull {shown(model)}")
    raise unknown(model)


def stored_folder(model: str) -> Path | None:
    """The folder of the store that holds what `model` names, whatever its state; None when there is none."""
    name = model.partition("@")[0]
    candidates = [name] if is_store_name(name) else []
    short = short_name(name)
    candidates += [short] if short is not None else []
    meant = hub_name(name)
    candidates += [meant.folder] if meant is not None else []
    return next((paths.models() / c for c in candidates if (paths.models() / c).is_dir()), None)


def is_store_name(name: str) -> bool:
    """Whether the name can be that of a folder of the store, also of one that no pull made."""
    return STORE_NAME.fullmatch(name) is not None or ("/" not in name and is_safe_part(name))


def weights_path(directory: Path) -> Path:
    """The GGUF file (the first of a split one) of a directory that has no other form of a model; else the directory."""
    if not directory.is_dir() or (directory / "config.json").exists():
        return directory
    files = sorted(path for path in directory.iterdir() if path.name.lower().endswith(GGUF) and path.is_file())
    return files[0] if files else directory


def _check(model: str, folder: Path) -> None:
    """Raises FtError for a folder that is no model, lacks a part of one, or holds another revision."""
    lost = manifest.damaged(folder)
    if lost is not None:
        raise FtError(f"the model {model} is damaged: its file {lost} is missing or cut short", again(model, folder))
    path = weights_path(folder)
    if path == folder and not (folder / "config.json").is_file():
        raise FtError(f"the store's {model} holds no model", again(model, folder))
    revision = model.partition("@")[2]
    written = manifest.read(folder) if revision else None
    if revision and (written is None or revision not in (written.source.requested, written.source.revision)):
        has = written.source.revision[:12] if written and written.source.revision else "no known revision"
        raise FtError(f"the store holds {has} of {model.partition('@')[0]}, not {revision}", f"ft pull {model}")


def again(model: str, folder: Path) -> str:
    """The command that brings a model of the store anew: from where its record says that it came."""
    if short_name(model) is not None or hub_name(model) is not None:
        return f"ft pull {shown(model)}"
    written = manifest.read(folder)
    if written is not None and written.source.kind != "recipe":
        return f"ft pull {shlex.quote(shown(written.source.repo))}"
    return f"ft rm {shlex.quote(shown(model))}, and pull it again from where it came"


def looks_like_path(model: str) -> bool:
    """A path starts with `/`, `./`, `../` or `~`, or names an existing directory or GGUF file and no model of the
    store or the catalogue.
    """
    if not model or "\0" in model:
        return False
    if model in (".", "..") or model.startswith(("/", "./", "../", "~")):
        return True
    if short_name(model) is not None or stored_folder(model) is not None:
        return False
    try:
        path = Path(model)
        return path.is_dir() or (model.lower().endswith(GGUF) and path.is_file())
    except OSError:  # longer than a name can be
        return False


def unknown(model: str) -> FtError:
    """What to say of a name that is neither in the store nor in the catalogue nor a repository's."""
    from difflib import get_close_matches

    root = paths.models()
    stored = [canonical(path.name) for path in root.iterdir() if is_store_name(path.name)] if root.is_dir() else []
    close = get_close_matches(model.lower()[:100], dict.fromkeys([*stored, *CATALOGUE]), CLOSEST)
    meant = f"; there is {' or '.join(close)}" if close else ""
    return FtError(
        f"no model is called {shown(model)}{meant}",
        "ft list, ft pull demo, ft pull --help for other names, or give org/name of the Hub or a directory",
    )


def _path(path: Path, typed: str) -> Path:
    try:
        if path.is_file() and path.name.lower().endswith(GGUF):
            return path
        exists = path.is_dir()
        found = weights_path(path) if exists else path
        if exists and (found != path or (path / "config.json").is_file()):
            return found
    except (OSError, ValueError):
        exists = False
    if not exists:
        raise FtError(f"there is no directory {typed}", "ft list")
    raise FtError(f"{typed} holds no config.json and no GGUF file, so it is not a model", "ft list")
