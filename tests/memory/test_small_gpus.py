"""Smaller GPUs with a model in the shape of Qwen3.6-35B-A3B: what the plan gives them, and the documented table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftengine.bench.shapes import QWEN36
from ftengine.bench.synthetic import SyntheticSource
from ftengine.config import EngineConfig
from ftengine.errors import ConfigError
from ftengine.formats.format import BF16, NVFP4, Format
from ftengine.memory import estimate
from ftengine.memory.vram import Demand, DevicePlan, least_bytes, plan_device

GIB = 1 << 30
TABLE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
ROW = re.compile(r"^\| \d+ GB, ([\d.]+) GiB \| (\w+) \| (all|[\d]+ %) \| ([\d,]+) \| (\d+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def demands() -> dict[str, Demand]:
    """By the format of dense weights."""
    return {dense.name.upper(): demand(dense) for dense in (BF16, NVFP4)}


def demand(dense: Format) -> Demand:
    return Demand(
        weights=estimate.weight_sizes(SyntheticSource(QWEN36, NVFP4, dense), QWEN36),
        workspace=estimate.decode_workspace(QWEN36),
        prefill=estimate.prefill_bytes_per_token(QWEN36, "bfloat16"),
        token=estimate.kv_bytes_per_token(QWEN36, "bfloat16"),
        state=estimate.state_bytes(QWEN36),
        top_k=QWEN36["num_experts_per_tok"],
        max_context=QWEN36["max_position_embeddings"],
    )


def planned(demand: Demand, free: float, **settings) -> DevicePlan:
    return plan_device(EngineConfig("x", **settings), demand, int(free * GIB))


def test_the_documented_table(demands: dict[str, Demand]) -> None:
    """To a percent: a real checkpoint keeps its routers in BF16 where the rest is NVFP4."""
    rows = ROW.findall(TABLE.read_text(encoding="utf-8"))
    assert len(rows) >= 6
    for free, dense, slots, chunk, running in rows:
        made = planned(demands[dense], float(free))
        assert made.resident == (slots == "all")
        share = 100 * made.slots.value / demands[dense].weights.total
        assert made.resident or abs(share - int(slots.removesuffix(" %"))) <= 1, (free, share)
        assert (f"{made.prefill_chunk.value:,}", str(made.max_running.value)) == (chunk, running), free
        assert made.context.value == 32768
        assert made.used <= made.budget.value == int(int(float(free) * GIB) * 0.9)


@pytest.mark.parametrize("left", [8, 12, 16, 24, 32, 141])
def test_each_size_serves_with_the_default_settings(left: int, demands: dict[str, Demand]) -> None:
    """20 KiB a token for the whole default context; more memory never gives fewer experts."""
    wants = demands["BF16"]
    assert wants.token == 20 << 10
    made, less = planned(wants, left - 0.5), planned(wants, left - 1.0)
    assert made.context.value == 32768
    assert made.slots.value >= less.slots.value
    assert made.resident == (left >= 32)
    assert made.resident or 0 < made.slots.value < wants.weights.total
    assert made.slots.value + made.staging.value >= wants.top_k
    assert (made.notes != ()) == (not made.resident)


def test_what_is_too_small_is_told_with_the_least_that_works(demands: dict[str, Demand]) -> None:
    wants = demands["BF16"]
    least = least_bytes(wants, EngineConfig("x")) / GIB
    assert 5 < least < 7  # 5 GiB of dense weights
    with pytest.raises(ConfigError, match=r"need \d\.\d\d GiB, but of the GPU's memory 4\.50 GiB can be used"):
        planned(wants, 5)
    smallest = planned(wants, least / 0.9 + 0.1, context=1024, max_running_requests=1, cache_device=0)
    assert smallest.slots.value >= 0
