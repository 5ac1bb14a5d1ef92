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
    """Either made here (`module`) or a repository of the Hub (`repo`).

    revision: only a commit whose files were served and checked; empty: `main`, resolved and recorded at each pull.
    """

    description: str
    module: str = ""
    repo: str = ""
    revision: str = ""
    served: bool = True  # False: it can be fetched, but ft cannot run it yet

    def recipe(self) -> Recipe:
        return cast(Recipe, importlib.import_module(self.module))


CATALOGUE = {
    "demo": Entry("SmolLM2-135M-Instruct as a Mixture of Experts, for trying things out", "ftlaunch.store.demo.build"),
    "qwen3.6-35b-a3b": Entry("Qwen3.6 35B-A3B, BF16", repo="Qwen/Qwen3.6-35B-A3B"),
    "qwen3.6-35b-a3b-fp8": Entry("Qwen3.6 35B-A3B, FP8 in blocks of 128", repo="Qwen/Qwen3.6-35B-A3B-FP8"),
    "qwen3.6-35b-a3b-nvfp4": Entry("Qwen3.6 35B-A3B, NVFP4", repo="nvidia/Qwen3.6-35B-A3B-NVFP4"),
    "qwen3-30b-a3b": Entry("Qwen3 30B-A3B, BF16", repo="Qwen/Qwen3-30B-A3B"),
    "qwen3-coder-30b-a3b": Entry("Qwen3-Coder 30B-A3B, BF16", repo="Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    "gpt-oss-20b": Entry("gpt-oss 20B, MXFP4", repo="openai/gpt-oss-20b", served=False),
    "gpt-oss-120b": Entry("gpt-oss 120B, MXFP4", repo="openai/gpt-oss-120b", served=False),
    "deepseek-v4-flash": Entry("DeepSeek V4 Flash", repo="deepseek-ai/DeepSeek-V4-Flash", served=False),
    "glm-4.7": Entry("GLM 4.7, BF16", repo="zai-org/GLM-4.7", served=False),
    "glm-5.2": Entry("GLM 5.2, BF16", repo="zai-org/GLM-5.2", served=False),
}


def short_name(model: str) -> str | None:
    """The catalogue's name for a name in any case, or for a repository; None when the catalogue has no such model."""
    lower = model.lower()
    if lower in CATALOGUE:
        return lower
    return next((name for name, entry in CATALOGUE.items() if entry.repo and entry.repo.lower() == lower), None)
