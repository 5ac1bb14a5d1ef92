"""Dialects to test with: the makers' own templates and tokenizers where `../shared` has them, and a small one."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftengine.dialect import Dialect, open_dialect

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
SMALL = ROOT / "tests" / "support" / "scripted_checkpoint"
TEMPLATES = sorted((SHARED / "templates").glob("*.jinja"))
NO_SHARED = "../shared is not beside the repository"


@dataclass
class Files:
    """What `open_dialect` reads of a checkpoint."""

    path: Path
    chat_template: str | None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 1 << 18
    eos_token_ids: tuple[int, ...] = ()

    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"


@cache
def small_dialect(template: str | None) -> Dialect:
    """A dialect of this template over the small byte-level vocabulary of tests/support."""
    return open_dialect(Files(SMALL, template, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}))


@pytest.fixture(params=TEMPLATES or [None], ids=lambda path: path.stem if path else "none")
def shared_template(request: pytest.FixtureRequest) -> str:
    if request.param is None:
        pytest.skip(NO_SHARED)
    return str(request.param.read_text("utf-8"))


@pytest.fixture(scope="session")
def shared_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name to a folder with that family's tokenizer.json."""

    @cache
    def unpack(name: str) -> Path:
        source = SHARED / "tokenizers" / name
        if not source.is_dir():
            pytest.skip(NO_SHARED)
        if (source / "tokenizer.json").exists():
            return source
        folder = tmp_path_factory.mktemp(name)
        (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
        return folder

    return unpack


@cache
def library(path: Path) -> Any:
    """The tokenizer library itself, as the reference."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


@pytest.fixture(scope="session")
def qwen(shared_tokenizer: Callable[[str], Path]) -> Dialect:
    """Qwen3.6: XML calls and reasoning, its real vocabulary."""
    folder = shared_tokenizer("qwen3.6")
    return open_dialect(Files(folder, (folder / "chat_template.jinja").read_text("utf-8")))
