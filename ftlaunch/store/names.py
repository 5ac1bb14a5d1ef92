"""From what a person types after --model to a directory with a complete model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ftengine.errors import FtError
from ftlaunch import paths
from ftlaunch.store import manifest
from ftlaunch.store.catalogue import CATALOGUE

STORE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def canonical(model: str) -> str:
    """One spelling for one model: a store name as it is, a directory as its absolute path."""
    if looks_like_path(model):
        return str(Path(os.path.abspath(os.path.expanduser(model))))  # noqa: PTH100, PTH111 - also for odd names
    return model


def resolve(model: str) -> Path:
    """The directory that holds `model`. Raises FtError with what to do when there is none."""
    if looks_like_path(model):
        return _directory(Path(canonical(model)), model)
    if STORE_NAME.fullmatch(model) and (paths.models() / model / "config.json").is_file():
        return _whole(model, paths.models() / model)
    if model in CATALOGUE:
        raise FtError(f"the model {model} is not in the store yet", f"ft pull {model}")
    raise unknown(model)


def _whole(name: str, path: Path) -> Path:
    lost = manifest.damaged(path) if name in CATALOGUE else None
    if lost is not None:
        raise FtError(f"the model {name} is damaged: its file {lost} is missing or cut short", f"ft pull {name}")
    return path


def looks_like_path(model: str) -> bool:
    """A path starts with `/`, `./`, `../` or `~`, or names an existing directory and no model of the store."""
    if model in (".", "..") or model.startswith(("/", "./", "../", "~")):
        return True
    if not model or "\0" in model or model in CATALOGUE or _in_store(model):
        return False
    try:
        return Path(model).is_dir()
    except OSError:  # longer than a name can be
        return False


def unknown(model: str) -> FtError:
    """What to say of a name that is neither in the store nor in the catalogue."""
    shown = model if 0 < len(model) <= 100 and model.isprintable() else f"{model[:40]!a}"
    if HUB_NAME.fullmatch(model):
        folder = f"./{model.partition('/')[2]}"
        return FtError(
            f"{shown} looks like a model on the Hugging Face Hub, which ft cannot fetch yet; it serves a local copy",
            f"hf download {model} --local-dir {folder} && ft serve --model {folder}",
        )
    known = ", ".join(CATALOGUE)
    return FtError(f"no model is called {shown} (to fetch: {known})", "ft list, ft pull demo, or give a directory")


def _in_store(model: str) -> bool:
    return STORE_NAME.fullmatch(model) is not None and (paths.models() / model).is_dir()


def _directory(path: Path, typed: str) -> Path:
    try:
        if (path / "config.json").is_file():
            return path
        exists = path.is_dir()
    except (OSError, ValueError):
        exists = False
    if not exists:
        raise FtError(f"there is no directory {typed}", "ft list")
    raise FtError(f"{typed} holds no config.json, so it is not a model in Hugging Face form", "ft list")
