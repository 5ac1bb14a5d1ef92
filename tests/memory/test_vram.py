"""The GPU's memory as it is divided: sums worked out by hand, refusals by their numbers, what holds for any model."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.memory.estimate import WeightSizes
from ftengine.memory.vram import Demand, DevicePlan, budget, least_bytes, plan_device

MIB, GIB = 1 << 20, 1 << 30


def config(**values) -> EngineConfig:
    return EngineConfig("somewhere", **values)


def model(**changes) -> Demand:
    """Numbers that are easily added: 1 GiB dense, 4 layers of 64 experts of 16 MiB, 4 GiB in all; 16 KiB a token."""
    weights = WeightSizes(dense=GIB, block=16 * MIB, experts=64, layers=4, banks=4 * GIB)
    demand = Demand(weights, workspace=0, prefill=0, token=16384, state=0, top_k=4, max_context=1 << 18)
    return dataclasses.replace(demand, **changes)


def plan(demand: Demand, usable: int, **values) -> DevicePlan:
    """Of `usable` bytes that may all be used, no lower tiers, and no anchors unless `values` say so. A model without
    recurrent state gets the spare slot besides: a page."""
    slots = 0 if demand.state else 16 * demand.token
    return plan_device(
        config(**{"memory_ratio": 1.0, "cache_device": 0, "cache_host": 0, "cache_disk": 0, **values}),
        demand,
        usable + slots,
    )


PAGE = 16 * 16384  # bytes of this slot for `model()`


def test_everything_in_order_and_the_rest_for_experts() -> None:
    """4.5 GiB less 1 dense and 0.5 of 32768 tokens: 3 GiB are 192 blocks, of which 24, an eighth, and no fewer than the
    32 that 8 sequences of 4 experts may need at once, are staging."""
    made = plan(model(), 4 * GIB + 512 * MIB)
    assert made.context == Resolved(32768, "default")
    assert made.kv_tokens == Resolved(32768, "one context, shared by the sequences")
    assert made.max_running == Resolved(8, "default")
    assert (made.staging.value, made.slots.value) == (32, 160)
    assert not made.resident
    assert made.used == made.budget.value == 4 * GIB + 512 * MIB + PAGE
    assert sum(made.parts(model()).values()) == made.used


def test_what_foretells_experts_is_taken_from_slots() -> None:
    """Of the same memory 24 MiB: 1.5 blocks. Nothing where every expert has a slot, or none has."""
    demand = model(weights=dataclasses.replace(model().weights, next_routers=24 * MIB))
    made = plan(demand, 4 * GIB + 512 * MIB)
    assert (made.staging.value, made.slots.value, made.next_routers) == (32, 158, 24 * MIB)
    assert made.parts(demand)["next routers"] == 24 * MIB
    assert sum(made.parts(demand).values()) == made.used == made.budget.value - 8 * MIB
    everything, nothing = plan(demand, 8 * GIB), plan(demand, 4 * GIB + 512 * MIB, moe_backend="cpu")
    assert (everything.resident, everything.next_routers) == (True, 0)
    assert (nothing.slots.value, nothing.next_routers) == (0, 0)
    assert plan(demand, 2 * GIB + 16 * MIB, max_running_requests=1).slots.value == 0
    assert plan(demand, 2 * GIB + 16 * MIB, max_running_requests=1).next_routers == 0


def test_what_a_smaller_context_would_buy_is_said() -> None:
    """Half of 32768 tokens is 256 MiB: 16 blocks."""
    (note,) = plan(model(), 4 * GIB + 512 * MIB).notes
    assert "160 of 256 experts (62%) have a slot" in note
    assert "keys and values of 16384 tokens in place of 32768 would make room for 16 more" in note


def test_all_experts_are_resident_when_they_fit_and_the_rest_holds_keys_and_values() -> None:
    """5.5 GiB are just enough; half a GiB more is another context."""
    exact = plan(model(), 5 * GIB + 512 * MIB)
    assert (exact.resident, exact.slots.value, exact.staging.value) == (True, 256, 0)
    assert (exact.kv_tokens.value, exact.notes) == (32768, ())
    more = plan(model(), 6 * GIB)
    assert more.kv_tokens == Resolved(65536, "what the experts leave")
    plenty = plan(model(), 100 * GIB)
    assert plenty.kv_tokens == Resolved(8 * 32768, "8 contexts")
    assert plenty.used == GIB + 4 * GIB + 4 * GIB + PAGE
    assert not plan(model(), 5 * GIB + 511 * MIB).resident


SIZES = [
    ({"moe_cache_size": 100}, 100, "asked for: 100 slots"),
    ({"moe_cache_rate": 0.25}, 64, "asked for: 0.25 of all"),
    ({"moe_cache_rate": 0.0}, 0, "asked for: 0 of all"),
    ({"moe_cache_mem": GIB + 15 * MIB}, 64, "asked for: 1.01 GiB"),
    ({"moe_backend": "cpu"}, 0, "moe_backend cpu: the CPU computes them in decode"),
]


@pytest.mark.parametrize(("values", "slots", "reason"), SIZES)
def test_slots_that_are_asked_for(values: dict, slots: int, reason: str) -> None:
    """Also where all would fit; staging then has what it wants, two layers of experts."""
    made = plan(model(), 100 * GIB, **values)
    assert made.slots == Resolved(slots, reason)
    assert (made.staging.value, made.resident, made.notes) == (128, False, ())


@pytest.mark.parametrize("values", [{"moe_cache_size": 5000}, {"moe_cache_rate": 1.0}, {"moe_cache_mem": 100 * GIB}])
def test_as_many_slots_as_experts_is_resident(values: dict) -> None:
    assert plan(model(), 100 * GIB, **values).resident
    assert not plan(model(), 100 * GIB, moe_backend="offload", **values).resident


def test_states_of_running_sequences_and_anchors() -> None:
    """63.75 MiB of state and a page of 0.25 MiB each, one slot more than there are for what belongs to no sequence.
    20 GiB less weights, 9 slots, tokens and least staging are 17.44: a twentieth holds 13 anchors, prefill wants two a
    sequence. With 2 sequences it is 17.81, and 14 are more than the least, 8."""
    demand = model(state=64 * MIB - 256 * 1024)

    def anchored(usable: int, **values) -> DevicePlan:
        return plan_device(config(memory_ratio=1.0, cache_host=0, cache_disk=0, **values), demand, usable)

    made = anchored(20 * GIB)
    assert (made.max_running.value, made.state_slots.value, made.slot) == (8, 8 + 16, 64 * MIB)
    assert made.cache_device == Resolved(1 * GIB, "16 that prefill wants, 64.0 MiB each")
    assert made.state_slots.reason == "8 running, 16 anchors (16 that prefill wants, 64.0 MiB each)"
    assert made.parts(demand)["states and anchors"] == 25 * 64 * MIB
    assert anchored(20 * GIB, cache_device=0).state_slots.value == 8
    assert anchored(20 * GIB, cache_device=300 * MIB).state_slots.value == 8 + 4
    two = anchored(20 * GIB, max_running_requests=2)
    assert two.state_slots.value == 2 + 14
    assert two.cache_device.reason == "1/20 of 17.81 GiB, 64.0 MiB each"
    small = anchored(4 * GIB)
    assert small.max_running.value == 4
    assert "1/8 of 3.00 GiB" in small.max_running.reason
    assert small.state_slots.value == 4 + 3  # an eighth of 1.69 GiB
    plenty = anchored(1000 * GIB)
    assert plenty.cache_device.value == 8 * GIB


def test_without_recurrent_state_the_ends_of_prompts_are_kept() -> None:
    """A page of 0.25 MiB each, eight for each of 8 sequences, where that is less than a twentieth."""
    made = plan_device(config(memory_ratio=1.0), model(), 20 * GIB)
    assert made.state_slots.value == 64
    assert made.cache_device == Resolved(
        16 * MIB, "the model has no recurrent state: the ends of 64 prompts, 0.2 MiB each"
    )
    less = plan_device(config(memory_ratio=1.0), model(), 2 * GIB + 20 * MIB)
    assert 0 < less.state_slots.value < 64


def test_a_small_gpu_computes_smaller_steps() -> None:
    """1 MiB of activations a token: an eighth of 7 GiB is 896 tokens' worth."""
    demand = model(prefill=MIB)
    assert plan(demand, 100 * GIB).prefill_chunk == Resolved(8192, "default")
    small = plan(demand, 8 * GIB)
    assert (small.prefill_chunk.value, small.workspace) == (512, 512 * MIB)
    assert "1/8 of 7.00 GiB" in small.prefill_chunk.reason
    asked = plan(demand, 8 * GIB, prefill_chunk=3000)
    assert (asked.prefill_chunk, asked.workspace) == (Resolved(3000, "asked for"), 3000 * MIB)


def test_the_context_gives_way_before_the_model_is_refused() -> None:
    """320 MiB after the dense weights and 32 staging blocks of 16 MiB do not leave 32768 tokens."""
    made = plan(model(), GIB + 512 * MIB + 320 * MIB)
    assert made.context == Resolved(20480, "what 0.81 GiB allow")
    assert made.slots.value == 0
    assert made.staging.value == 32


def test_a_model_without_experts_or_states() -> None:
    demand = model(weights=WeightSizes(dense=GIB), top_k=0)
    made = plan(demand, 3 * GIB)
    assert (made.slots.value, made.staging.value, made.resident) == (0, 0, False)
    assert made.kv_tokens.value == (2 * GIB) // 16384


REFUSED = [
    # settings, usable bytes, what is said, what is advised
    (
        {},
        GIB - 1 - PAGE,
        r"dense weights need 1.00 GiB, but .* 1.00 GiB can be used \(1 \(asked for\) of",
        "--device cpu",
    ),
    ({"context": 65536}, GIB + 768 * MIB, r"keys and values of 65536 tokens need 1.00 GiB", "--context 16384"),
    ({"kv_tokens": 65536}, GIB + 768 * MIB, r"keys and values of 65536 tokens need 1.00 GiB", "--context 16384"),
    (
        {"moe_backend": "resident"},
        5 * GIB,
        r"all 256 experts need 4.00 GiB, 3.50 GiB .* are left",
        "--moe-backend auto",
    ),
    ({"moe_cache_size": 200}, 4 * GIB, r"200 expert slots need 3.12 GiB, 2.00 GiB .* 0.50 GiB of staging", "size 128"),
    ({"moe_cache_rate": 0.75}, 4 * GIB, r"192 expert slots need 3.00 GiB", "--moe-cache-size 128"),
    ({}, GIB + 500 * MIB, r"32 experts on their way through the GPU need 0.50 GiB", "--device cpu"),
    ({"prefill_chunk": 1 << 20}, 4 * GIB, r"workspace for steps of 1048576 tokens need 1024.00 GiB", "length 512"),
    ({"max_running_requests": 4000}, 20 * GIB, r"states of 4000 sequences need 250.06 GiB", "requests 1"),
    ({"cache_device": 50 * GIB}, 20 * GIB, r"800 anchors need 50.00 GiB", "--cache-device 0"),
    ({"cache_device": 5 * MIB}, 20 * GIB, r"--cache-device is 5.0 MiB, and one anchor takes 64.0 MiB", "513MiB"),
    ({"context": 1 << 19}, 20 * GIB, r"a context of 524288 tokens was asked for, the model holds 262144", "262144"),
]


@pytest.mark.parametrize(("settings", "usable", "says", "advises"), REFUSED)
def test_what_does_not_fit_is_refused_with_numbers(settings: dict, usable: int, says: str, advises: str) -> None:
    states = bool({"max_running_requests", "cache_device"} & set(settings))
    demand = model(prefill=MIB if "prefill_chunk" in settings else 0, state=64 * MIB - 256 * 1024 if states else 0)
    with pytest.raises(ConfigError, match=says) as error:
        plan(demand, usable, **settings)
    assert "\n" not in str(error.value)
    assert advises in error.value.next_step


def test_the_advised_context_is_accepted() -> None:
    with pytest.raises(ConfigError) as error:
        plan(model(), GIB + 768 * MIB, context=65536)
    advised = int(error.value.next_step.rpartition(" ")[2])
    assert plan(model(), GIB + 768 * MIB, context=advised).context.value == advised


def test_the_budget_is_a_share_of_what_is_free() -> None:
    assert budget(config(), 10 * GIB) == Resolved(9 * GIB, "0.9 (default) of 10.00 GiB free")
    assert budget(config(memory_ratio=0.5), 10 * GIB) == Resolved(5 * GIB, "0.5 (asked for) of 10.00 GiB free")


def test_the_planner_loads_no_torch() -> None:
    code = "import sys, ftengine.memory.vram, ftengine.memory.gpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


demands = st.builds(
    Demand,
    weights=st.one_of(
        st.builds(WeightSizes, dense=st.integers(0, 8 * GIB)),
        st.builds(
            WeightSizes,
            dense=st.integers(0, 8 * GIB),
            block=st.integers(1, 64).map(lambda pages: pages * 65536),
            experts=st.integers(1, 300),
            layers=st.integers(1, 60),
            next_routers=st.integers(0, 100 * MIB),
        ),
    ),
    workspace=st.integers(0, GIB),
    prefill=st.integers(0, MIB),
    token=st.integers(0, 400_000),
    state=st.one_of(st.just(0), st.integers(1, 200 * MIB)),
    top_k=st.integers(1, 16),
    max_context=st.integers(1, 1 << 20),
)
settings = st.fixed_dictionaries(
    {},
    optional={
        "max_running_requests": st.integers(1, 64),
        "kv_tokens": st.integers(2, 200_000),
        "cache_device": st.integers(0, 4 * GIB),
        "prefill_chunk": st.integers(1, 20_000),
        "moe_backend": st.sampled_from(["auto", "offload", "hybrid"]),
        "moe_cache_rate": st.floats(0, 1),
        "page_size": st.integers(1, 64),
    },
)
memory = st.integers(0, 200 * GIB)


@given(demands, memory, settings)
def test_no_plan_is_over_its_budget(demand: Demand, free: int, values: dict) -> None:
    try:
        made = plan_device(config(**values), demand, free)
    except ConfigError:
        return
    parts = made.parts(demand)
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == made.used <= made.budget.value <= 0.9 * free + 1
    assert made.kv_tokens.value >= made.context.value
    assert made.context.value <= demand.max_context
    assert made.kv_tokens.value % config(**values).page_size == 0
    anchors = (made.state_slots.value - made.max_running.value * bool(demand.state)) * made.slot
    assert 0 <= anchors <= made.cache_device.value == values.get("cache_device", anchors)
    total, backend = demand.weights.total, values.get("moe_backend", "auto")
    assert made.resident == (backend == "auto" and 0 < total == made.slots.value)  # the others keep their staging
    assert (made.staging.value == 0) == (made.resident or not total)


@given(demands, memory, memory, settings)
def test_more_memory_never_gives_fewer_experts_or_tokens(demand: Demand, one: int, two: int, values: dict) -> None:
    """With the parts before the experts fixed, which by default grow with the memory."""
    fixed = {
        "max_running_requests": 2,
        "cache_device": 0,
        "prefill_chunk": 512,
        "context": min(2048, demand.max_context),
    }
    assume(demand.max_context >= 2)
    values = {**values, **fixed}
    values.pop("kv_tokens", None)
    little, much = sorted((one, two))
    try:
        less = plan_device(config(**values), demand, little)
    except ConfigError:
        return
    more = plan_device(config(**values), demand, much)
    assert more.slots.value >= less.slots.value
    assert more.kv_tokens.value >= less.kv_tokens.value


@given(demands, memory)
def test_what_is_least_is_accepted(demand: Demand, free: int) -> None:
    """The check that sends a model to the CPU refuses nothing that could be served, with the smallest settings."""
    assume(demand.max_context >= 2)
    values = {
        "max_running_requests": 1,
        "cache_device": 0,
        "prefill_chunk": 512,
        "context": min(1024, demand.max_context),
    }
    page = 16 * demand.token
    if least_bytes(demand, config()) + page <= budget(config(), free).value:
        plan_device(config(**values), demand, free)
