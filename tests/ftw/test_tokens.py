"""The same logits and greedy tokens from FTW as from the source, for every architecture, from the directory alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ftengine.weights.convert.convert import convert
from ftengine.weights.convert.plan import Options
from ftengine.weights.ftw.layout import Origin
from tests.models import tiny
from tests.models.driver import generate, load_model, prefill_logits

PROMPTS = [random.Random(0).choices(range(tiny.VOCABULARY), k=length) for length in (23, 7)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["mixtral", "mixtral-window-tied", "qwen3", "qwen3-dense-among", "qwen3.5"])
def test_greedy_tokens(kind: str, dtype: str, tmp_path: Path) -> None:
    source = tiny.write(kind, tmp_path / "source")
    convert(source, tmp_path / "ftw", Options(), Origin(kind))
    original = load_model(source, dtype)
    tokens, logits = generate(original, PROMPTS, 24), prefill_logits(original, PROMPTS[0])
    (source / "model.safetensors").unlink()
    copy = load_model(tmp_path / "ftw", dtype)
    assert torch.equal(prefill_logits(copy, PROMPTS[0]), logits)
    assert generate(copy, PROMPTS, 24) == tokens


def test_quantized_experts_compute(tmp_path: Path) -> None:
    """NVFP4 experts and FP8 dense from FTW, against the same model in float32 whose weights are their meaning."""
    from safetensors.torch import load_file, save_file

    from tests.ftw.test_round_trip import values

    source = tiny.write("qwen3", tmp_path / "source")
    convert(source, tmp_path / "ftw", Options("nvfp4", "fp8"), Origin("x"))
    meaning = values(tmp_path / "ftw")
    stored = load_file(source / "model.safetensors")
    tensors = {name: meaning.get(name.removeprefix("model."), tensor) for name, tensor in stored.items()}
    assert any(not torch.equal(tensors[name], tensor) for name, tensor in stored.items())
    save_file(tensors, source / "model.safetensors")
    expected = generate(load_model(source), PROMPTS, 16)
    assert generate(load_model(tmp_path / "ftw"), PROMPTS, 16) == expected
