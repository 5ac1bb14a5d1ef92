"""What servers keep of prompts in files, for people: looked at and removed, also while servers run."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftlaunch import paths

if TYPE_CHECKING:
    from ftengine.cache.tiers.files import Entry, Folder
    from ftengine.cache.tiers.survey import Kept

# Of one model, as it wrote them (ftengine/api/answers.py); with what a save that was killed left beside it.
ANSWERS = re.compile(r"\.?answers-[0-9a-f]{16}.{0,64}", re.DOTALL)


@dataclass(frozen=True)
class Overview:
    """kept: by model and what else it depends on, the last used one first. unreadable: folders that are there and do
    not open."""

    kept: list[Kept]
    answers: list[Entry]
    unreadable: list[Path]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.kept) + sum(entry.size for entry in self.answers)


def overview(model: str | None = None) -> Overview:
    """Of one model, or of all. Raises OSError where the folder cannot be read; it is not made by looking."""
    root = paths.prompts()
    if not root.is_dir():
        return Overview([], [], [])
    from ftengine.cache.tiers.survey import survey

    kept = survey(root)
    with _opened(root) as folder:
        answers = [entry for entry in folder.entries() if ANSWERS.fullmatch(entry.name)]
        unreadable = [] if model else _unreadable(folder, {each.key for each in kept})
    if model is not None:
        kept = [each for each in kept if each.identity is not None and each.identity.model == model]
        names = _answers_of(model)
        answers = [entry for entry in answers if entry.name.lstrip(".").startswith(names)]
    return Overview(kept, answers, unreadable)


def remove(found: Overview) -> int:
    """Bytes that are free now. Follows no link, and leaves alone what is not ours. Raises OSError."""
    from ftengine.cache.tiers.survey import clear

    freed = clear(paths.prompts(), {each.key for each in found.kept})
    with _opened(paths.prompts()) as folder:
        for entry in found.answers:
            folder.remove(entry.name)
            freed += entry.size
    return freed


def _opened(root: Path) -> contextlib.closing[Folder]:
    from ftengine.cache.tiers.files import Folder

    return contextlib.closing(Folder.at(root))


def _unreadable(root: Folder, known: set[str]) -> list[Path]:
    from ftengine.cache.tiers.identity import key_folders

    found = []
    for name in key_folders(root):
        if name not in known:
            try:
                root.child(name).close()
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError:
                found.append(root.path / name)
    return found


def _answers_of(model: str) -> tuple[str, ...]:
    """Names of the files with a model's answers: they are called by where the model lies, or lay in the store."""
    from ftengine.api.answers import answers_path
    from ftengine.config import EngineConfig
    from ftengine.errors import FtError
    from ftlaunch.store import resolve
    from ftlaunch.store.names import hub_name, looks_like_path

    meant = hub_name(model)
    folders = [paths.models() / model.partition("@")[0], *([paths.models() / meant.folder] if meant else [])]
    places = [Path(model)] if looks_like_path(model) else folders
    with contextlib.suppress(FtError):
        places.append(resolve(model))
    found = (answers_path(EngineConfig(str(place), cache_dir=str(paths.prompts()))) for place in places)
    return tuple({path.name for path in found if path is not None})
