"""How far bfloat16 on the GPU is from float32, beside how far transformers in bfloat16 is, on the same prompts.

    python -m pytest -m slow -s tests/gpu/test_precision.py

prints the figures. The tiny checkpoints are random, so their routers decide more closely than trained ones do: where
rounding turns a choice of experts, a token's logits are far off, on either side.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.gpu import models
from tests.gpu.models import load_gpu, logits_of, setup, start
from tests.models import driver, tiny

PROMPTS, SHORTEST, LONGEST = 200, 16, 200
TOGETHER, CHUNK, DECODES = 2, 64, 4  # prompts in a batch; tokens of a prefill step; the last ones are decode steps
PAGES = TOGETHER * (LONGEST // models.PAGE_SIZE + 1)
BOUND = 1.5  # times transformers' error
# What the GPU's kernels want of heads; the rest is as in tests/models/tiny.py.
CHANGES = {"mixtral": {}, "qwen3": {"head_dim": 32}, "qwen3.5": {"linear_value_head_dim": 32}}


@dataclass(frozen=True)
class Error:
    """Against float32: root mean square of the logits' difference, and KL divergence in nats, over many positions."""

    rms: float
    last: float  # the same of the prompts' last positions
    divergence: float
    divergence_p99: float

    def __str__(self) -> str:
        divergence = f"KL mean {self.divergence:.2e}, p99 {self.divergence_p99:.2e}"
        return f"rms {self.rms:.4f}, of last positions {self.last:.4f}, {divergence}"


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> Error:
    """Both: logits [T, V] of each prompt."""
    rows, wanted = torch.cat(found).double(), torch.cat(exact).double()
    assert rows.isfinite().all()
    last = torch.stack([a[-1].double() - b[-1].double() for a, b in zip(found, exact, strict=True)])
    reference = wanted.log_softmax(-1)
    divergence = (reference.exp() * (reference - rows.log_softmax(-1))).sum(-1)
    return Error(
        float((rows - wanted).square().mean().sqrt()),
        float(last.square().mean().sqrt()),
        float(divergence.mean()),
        float(divergence.quantile(0.99)),
    )


def prompts_of(count: int) -> list[list[int]]:
    draw = random.Random(11)
    return [
        [draw.randrange(tiny.VOCABULARY) for _ in range(draw.randint(SHORTEST, LONGEST))] for _ in range(count)
    ]  # fmt: skip


def ours(folder: Path, device: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = load_gpu(folder, device, dtype="bfloat16")
    try:
        model.prepare(setup(context=PAGES * models.PAGE_SIZE, max_running=TOGETHER))
        state, found = start(model, PAGES), []
        for first in range(0, len(prompts), TOGETHER):
            state.free_pages, state.free_slots = list(range(PAGES)), list(range(models.SLOTS))
            found += logits_of(state, prompts[first : first + TOGETHER], CHUNK, DECODES)
        return found
    finally:
        model.close()


def compare(kind: str, folder: Path, device: str, count: int) -> tuple[Error, Error]:
    """Ours and transformers'."""
    tiny.write(kind, folder, **CHANGES[kind])
    prompts = prompts_of(count)
    exact, rounded = (driver.load_reference(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    expected = [driver.reference_logits(exact, prompt) for prompt in prompts]
    theirs = error([driver.reference_logits(rounded, prompt) for prompt in prompts], expected)
    return error(ours(folder, device, prompts), expected), theirs


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGES)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(kind: str, device: str, tmp_path: Path) -> None:
    if device != "cuda":
        pytest.skip("200 prompts take hours without a GPU; tests/gpu/test_decoder.py has one of 60 tokens")
    found, theirs = compare(kind, tmp_path / kind, device, PROMPTS)
    print(f"\n{kind}, {PROMPTS} prompts, bfloat16 against float32\n  ours: {found}\n  transformers: {theirs}")
    assert theirs.rms > 0
    assert found.rms <= BOUND * theirs.rms
    assert found.last <= BOUND * theirs.last
    assert found.divergence <= BOUND**2 * theirs.divergence  # it grows with the square of the error
