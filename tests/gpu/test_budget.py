"""The GPU's memory while a server works is within the budget that it was given, as torch and as the driver count it.

    python -m pytest -m slow -s tests/gpu/test_budget.py

Nothing else may take or leave memory of the GPU meanwhile. That no plan is over its budget is in tests/memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("ftengine._native", reason="the decoder's CPU lane needs the C++ kernels, which are not built")

from ftengine.memory.vram import plan_device
from ftengine.scheduler.start_gpu import demand_of
from tests.gpu.budget_child import FREE, SETTINGS
from tests.gpu.test_start_parts import beginning
from tests.models import tiny

SECONDS = 280.0  # most of them for compiling
MODEL = {
    "vocab_size": 4096, "hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU whose memory could be used")
def test_memory_is_within_the_budget_while_prompts_and_answers_are_computed(tmp_path: Path) -> None:
    """Of 2 GiB, nine tenths may be used; the last one is for what the driver takes besides, for kernels and graphs."""
    folder = tiny.write("qwen3.5", tmp_path / "model", **MODEL)
    begin = beginning(folder, device="cuda", **SETTINGS)
    plan = plan_device(begin.config, demand_of(begin), FREE)
    assert 0 < plan.slots.value < begin.sizes.total, "it is to be full"
    command = [sys.executable, "-m", "tests.gpu.budget_child", str(folder)]
    environment = {**os.environ, "FT_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    found = json.loads(child.stdout.splitlines()[-1])
    print("\n" + ", ".join(f"{name} {value}" for name, value in found.items()))
    assert found["planned"] <= found["budget"] < FREE
    assert found["used"] <= found["planned"]
    assert found["used"] <= found["held"] <= found["budget"]
    assert found["gone"] <= FREE
    assert found["slots"] > 0
    assert found["fetched"] + found["cpu_experts"] > 0, "nothing was missing"
