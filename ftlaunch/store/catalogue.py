"""The models that `ft pull` knows by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from pathlib import Path

    from ftlaunch.store.progress import Message, Progress


class Recipe(Protocol):
    """A module that makes one model."""

    def version(self) -> str:
        """Changes when the files that `build` makes change."""
        ...

    def build(self, directory: Path, downloads: Path, on_progress: Progress, on_message: Message) -> None:
        """Write a complete model folder. Files in `downloads` may be there already, whole or in parts."""
        ...


@dataclass(frozen=True)
class Entry:
    description: str
    module: str

    def recipe(self) -> Recipe:
        return cast(Recipe, importlib.import_module(self.module))


CATALOGUE = {
    "demo": Entry("SmolLM2-135M-Instruct as a Mixture of Experts, for trying things out", "ftlaunch.store.demo.build")
}
