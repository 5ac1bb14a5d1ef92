"""A model served from GGUF computes what transformers computes from the checkpoint that the file was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftengine.dialect import open_dialect
from ftengine.models.base import ModelOptions, load
from ftengine.weights.checkpoint import Checkpoint
from tests.models import tiny
from tests.models.driver import prefill_logits
from tests.support import gguf_convert

TOLERANCE = 2e-4


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "qwen3.5"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny.write(kind, tmp_path / "hub")
    checkpoint = Checkpoint.open(gguf_convert.convert(folder, tmp_path / "x.gguf"))
    assert checkpoint.architecture == Checkpoint.open(folder).architecture
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load(checkpoint, ModelOptions(dtype="float32"))
    tokens = torch.randint(0, tiny.VOCABULARY, (1, 50), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = reference(tokens).logits[0]
    torch.testing.assert_close(prefill_logits(ours, tokens[0].tolist()), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert open_dialect(checkpoint).vocab_size == tiny.VOCABULARY
