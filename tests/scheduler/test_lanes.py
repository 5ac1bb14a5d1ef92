"""Which strategy is chosen where experts are not pinned, and what the log says of it."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

pytest.importorskip("triton", reason="there is no Triton for this system")
pytest.importorskip("ftengine._native", reason="the CPU's lane is not built")

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.experts.profile import LaneProfile
from ftengine.memory.estimate import WeightSizes
from ftengine.memory.vram import Demand, plan_device
from ftengine.scheduler import lanes
from tests.experts.banks import bank
from tests.experts.test_profile import PROFILE

REFUSED = Resolved(False, "the limit of locked memory is 8 MiB")
WARNING = (
    "experts are not pinned, so the GPU cannot read them by itself: the limit of locked memory is 8 MiB; the CPU "
    "computes all that have no slot, and prompts take longer"
)
CPU_ALONE = msgspec.structs.replace(PROFILE, link=None, link_beside=None, cpu_beside=None)


def choose(pinned: Resolved[bool], profile: LaneProfile = CPU_ALONE, *, resident: bool = False, **settings):
    config = EngineConfig("x", **settings)
    demand = Demand(WeightSizes(dense=1 << 20), 0, 0, token=1024, state=0, top_k=2, max_context=64)
    plan = dataclasses.replace(plan_device(config, demand, 1 << 33), resident=resident)
    return lanes._choose(config, [bank("nvfp4")], 2, plan, pinned, lambda: (profile, "measured now"))


def test_experts_that_are_not_pinned_are_a_warning_and_the_cpus(caplog: pytest.LogCaptureFixture) -> None:
    strategy, costs, rests = choose(REFUSED)
    assert strategy == Resolved("hybrid", "experts are not pinned: the CPU computes all that have no slot")
    assert (costs, rests) == (None, False)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", WARNING)]


def test_nothing_is_said_where_they_are_pinned_or_need_not_be(caplog: pytest.LogCaptureFixture) -> None:
    choose(Resolved(True, "pinned"), PROFILE)
    assert choose(REFUSED, resident=True)[0].value == "resident"
    assert not caplog.records


def test_offload_needs_pinned_experts() -> None:
    with pytest.raises(ConfigError, match="--moe-backend offload needs pinned memory: the limit of locked memory"):
        choose(REFUSED, moe_backend="offload")
