"""The demo model, which is Mixtral's architecture with real weights, on the device in float32.

    python -m pytest -m slow tests/gpu/test_demo.py

The other sides are transformers and the CPU's engine, on the same weights. Without a GPU the whole model goes through
Triton's interpreter, which takes 13 minutes: one prompt and one decode step, with all experts resident.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")

from ftengine.kernels.triton import grouped
from ftengine.models.gpu.strategy import Strategy
from tests.gpu import models
from tests.models import driver

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3
EXPERTS = 120  # 30 layers of 4, of which a token takes 2
PROMPT = "The capital of France is Paris, which lies on the river Seine. The capital of Italy is"
STEPS = 24 if torch.cuda.is_available() else 1  # of decode
SHARE = 0.5  # of what is missing for the CPU
TALL = {"HEIGHT": 512, "WIDTH": 64}  # a sixtieth of the usual tiles' time in the interpreter


@pytest.mark.timeout(1800)  # a quarter of an hour through the interpreter, on a busy core
@pytest.mark.parametrize(("strategy", "slots"), [("resident", 0), ("hybrid", EXPERTS // 2)])
def test_logits_and_tokens_equal_transformers_and_the_cpus(
    strategy: Strategy, slots: int, demo_model: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every position of the prompt, computed in one step, and of the greedy answer, token by token."""
    if device == "cpu":
        if strategy != "resident":
            pytest.skip("only one strategy of the demo model without a GPU; tests/gpu/test_decoder.py has tiny ones")
        monkeypatch.setattr(grouped, "SLOW", {**grouped.SLOW, **TALL})
    prompt = Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(PROMPT).ids
    assert len(prompt) > 16, "a step of few tokens takes its products from the decode steps' kernels"
    reference = driver.load_reference(demo_model)
    tokens = prompt + driver.reference_generate(reference, prompt, STEPS)
    expected = driver.reference_logits(reference, tokens)
    del reference
    of_the_cpu = driver.prefill_logits(driver.load_model(demo_model), tokens)

    model = models.load_gpu(demo_model, device)
    try:
        model.prepare(models.setup(strategy, slots=slots, staging=4, max_running=1))
        assert model.experts.pool is not None
        if strategy == "hybrid":
            model.experts.pool.set_cpu_share(SHARE)
        (found,) = models.logits_of(models.start(model), [tokens], len(prompt), STEPS)
        counts = model.experts.stats()
        assert counts is not None
        if strategy == "hybrid":
            assert min(counts.total.hits, counts.total.fetched, counts.total.cpu_experts) > 0
    finally:
        model.close()
    furthest = [float((found - wanted).abs().max()) for wanted in (expected, of_the_cpu)]
    print(f"\n{strategy}: {len(tokens)} tokens, off by up to {furthest[0]:.1e} from transformers, {furthest[1]:.1e} "
          f"from the CPU's engine; the logits' spread is {float(expected.std()):.1f}")  # fmt: skip
    assert max(furthest) <= TOLERANCE
    assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens[len(prompt) :]
    assert found.argmax(-1).tolist() == of_the_cpu.argmax(-1).tolist()
