"""Answers under every pressure on the expert cache: any number of slots, any division of what is missing.

    python -m pytest -m slow tests/gpu/test_pressure.py

The other side is the torch decoder on the same NVFP4 weights, in float32. tests/gpu/test_decoder.py has a few of the
cases in every run; tests/gpu/test_server_faults.py wants 500 answers from real servers, one of each strategy and one
more with a fixed share, together.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")

from ftengine.formats.format import NVFP4
from ftengine.models.base import ModelOptions, load
from ftengine.weights.checkpoint import Checkpoint
from tests.gpu import models
from tests.models import driver
from tests.models.test_native_decoder import Requantized

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3
SHARES = [0.0, 0.5, 1.0]  # of the missing experts for the CPU
EXPERTS = 12  # in both layers together
PROMPTS = [models.prompt_of(5, 1), models.prompt_of(4, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("qwen3.5", tmp_path_factory.mktemp("pressure") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[torch.Tensor]:
    exact = load(Checkpoint.open(folder), ModelOptions("float32", source=Requantized(folder, NVFP4, widened=True)))
    return models.logits_of(driver.Driver(exact), PROMPTS, 4, 2)


@pytest.mark.parametrize("share", SHARES)
def test_any_number_of_slots_gives_the_same_answers(
    share: float, folder: Path, expected: list[torch.Tensor], device: str
) -> None:
    model = models.load_gpu(folder, device, source=Requantized(folder, NVFP4, widened=False))
    fetched = computed = found_there = 0
    try:
        for slots in range(EXPERTS + 1):
            model.prepare(models.setup("hybrid", slots=slots, staging=4, max_running=2))
            assert model.experts.pool is not None
            model.experts.pool.set_cpu_share(share)
            found = models.logits_of(models.start(model), PROMPTS, 4, 2)
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0, msg=partial("{}: {}".format, slots))
            assert [rows.argmax(-1).tolist() for rows in found] == [rows.argmax(-1).tolist() for rows in expected]
            counts = model.experts.stats()
            assert counts is not None
            fetched += counts.total.fetched
            computed += counts.total.cpu_experts
            found_there += counts.total.hits
    finally:
        model.close()
    assert found_there > 0
    assert (fetched > 0, computed > 0) == (share < 1, share > 0)
