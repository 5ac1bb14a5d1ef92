"""Small models for tests that make up their own tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftengine.models.base import Model
from tests.models.driver import load_model
from tests.prompts import small_models

VOCABULARY = 512
CONTEXT = 4096
KINDS = ("qwen3_moe", "qwen3_5_moe")


@dataclass(frozen=True)
class Loaded:
    folder: Path
    model: Model


Load = Callable[[str, str], Loaded]  # of a kind, in a dtype


def write(kind: str, folder: Path) -> Path:
    small_models.write(kind, folder, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    (folder / "tokenizer.json").write_text("{}")  # of no use but to be hashed
    return folder


def open_loaded(folder: Path, dtype: str) -> Loaded:
    return Loaded(folder, load_model(folder, dtype))
