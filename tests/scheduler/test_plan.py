"""How settings are resolved against memory: sums checked by hand, refusals by their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftengine.config import EngineConfig, Resolved, facts
from ftengine.errors import ConfigError
from ftengine.memory import estimate, machine
from ftengine.memory.plan import (
    check_banks,
    check_memory,
    plan_cache,
    resolve_dtype,
    resolve_prefill,
    resolve_threads,
    usable,
)

GIB = 1 << 30


def config(**values) -> EngineConfig:
    return EngineConfig("somewhere", **values)


@pytest.mark.parametrize(
    ("asked", "flags", "expected"),
    [
        ("float32", {"avx512_bf16"}, ("float32", "asked for")),
        ("auto", {"avx512_bf16"}, ("bfloat16", "the CPU has avx512_bf16")),
        ("auto", {"amx_bf16"}, ("bfloat16", "the CPU has amx_bf16")),
        ("auto", {"avx2"}, ("float32", "the CPU has no bfloat16 instructions")),
        ("auto", set(), ("float32", "the CPU has no bfloat16 instructions")),
    ],
)
def test_dtype(asked: str, flags: set[str], expected: tuple[str, str]) -> None:
    resolved = resolve_dtype(asked, frozenset(flags))
    assert (resolved.value, resolved.reason) == expected


def test_dtype_on_a_gpu() -> None:
    assert resolve_dtype("auto", frozenset(), device="cuda") == Resolved("bfloat16", "default on a GPU")
    assert resolve_dtype("float32", frozenset(), device="cuda").value == "float32"


def test_prefill_of_a_step() -> None:
    assert resolve_prefill(config()) == Resolved(2048, "default")
    assert resolve_prefill(config(prefill_chunk=7)) == Resolved(7, "asked for")


def test_experts_that_do_not_fit_beside_a_gpu_are_refused_with_numbers() -> None:
    check_banks(9 * GIB, 10 * GIB, "free memory of the machine")
    with pytest.raises(ConfigError, match=r"need 12.00 GiB of memory, but of 10.00 GiB available \(free memory"):
        check_banks(12 * GIB, 10 * GIB, "free memory of the machine")


def test_weights_and_cache_that_do_not_fit_are_refused_with_numbers() -> None:
    arguments = {"available": 10 * GIB, "source": "free memory of the machine"}
    check_memory(config(), 8 * GIB, token_bytes=0, **arguments)
    with pytest.raises(ConfigError, match=r"need 12.00 GiB and .* of 10.00 GiB available \(free memory") as error:
        check_memory(config(), 12 * GIB, token_bytes=0, **arguments)
    assert "9.00 GiB can be used" in str(error.value)
    assert error.value.next_step
    check_memory(config(context=1000), 8 * GIB, token_bytes=1 << 20, **arguments)
    with pytest.raises(ConfigError, match=r"1025 tokens of keys and values 1.00 GiB"):
        check_memory(config(context=1025), 8 * GIB, token_bytes=1 << 20, **arguments)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 0),
        ({"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}, 2 * 3 * 64 * 2),
        ({"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}, 2 * 3 * 16 * 2),
        (
            {"num_hidden_layers": 40, "full_attention_interval": 4, "num_key_value_heads": 2, "head_dim": 256},
            2 * 10 * 512 * 2,
        ),
        ({"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 1, "head_dim": 4}, 2 * 4 * 2),
        ({"num_hidden_layers": "many", "num_key_value_heads": -1, "head_dim": True}, 0),
    ],
)
def test_keys_and_values_are_estimated_from_the_configuration(values: dict, expected: int) -> None:
    """Worked out by hand: keys and values, layers with attention, key/value heads, head size, two bytes."""
    assert estimate.kv_bytes_per_token(values, "bfloat16") == expected


def test_plenty_of_memory() -> None:
    plan = plan_cache(config(), checkpoint_context=8192, token_bytes=1000, state_bytes=0, available=100 * GIB)
    assert plan.context == Resolved(8192, "the checkpoint's limit")
    assert plan.max_running == Resolved(8, "default")
    assert plan.kv_tokens == Resolved(8 * 8192, "8 contexts of 8192")
    assert plan.state_slots.value == 0


def test_a_huge_context_is_cut_by_default_and_kept_when_asked_for() -> None:
    arguments = {"checkpoint_context": 1 << 20, "token_bytes": 20480, "state_bytes": 0, "available": 100 * GIB}
    assert plan_cache(config(), **arguments).context == Resolved(131072, "default")
    assert plan_cache(config(context=500_000), **arguments).context == Resolved(500_000, "asked for")


def test_little_memory_bounds_context_and_kv_tokens() -> None:
    plan = plan_cache(config(), checkpoint_context=131072, token_bytes=65536, state_bytes=0, available=4 * GIB)
    affordable = int((4 * GIB - 4 * GIB // 10) * 0.6) // 65536
    assert plan.context.value == affordable < 131072
    assert "4.00 GiB" in plan.context.reason
    assert affordable <= plan.kv_tokens.value < affordable + 16
    assert plan.kv_tokens.value % 16 == 0


def test_what_is_planned_fits() -> None:
    for available in (1 * GIB, 5 * GIB, 40 * GIB):
        for state in (0, 1 << 20, 60 << 20):
            try:
                plan = plan_cache(config(max_running_requests=4), 262144, 20480, state, available)
            except ConfigError:
                continue
            assert plan.kv_tokens.value * 20480 + plan.state_slots.value * state <= usable(available)
            assert plan.kv_tokens.value >= plan.context.value >= 1024


def test_state_slots_hold_the_running_ones_and_snapshots() -> None:
    automatic = plan_cache(config(max_running_requests=4), 4096, 1000, 10 << 20, 10 * GIB)
    assert automatic.state_slots.value == 4 + int(9 * GIB * 0.1) // (10 << 20)
    asked = plan_cache(config(max_running_requests=4, snapshot_bytes=55 << 20), 4096, 1000, 10 << 20, 10 * GIB)
    assert asked.state_slots.value == 4 + 5
    none = plan_cache(config(max_running_requests=4, snapshot_bytes=0), 4096, 1000, 10 << 20, 10 * GIB)
    assert none.state_slots.value == 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"context": 9000}, "a context of 9000 tokens was asked for, the model holds 8192"),
        ({"kv_tokens": 5000, "context": 6000}, "kv_tokens is 5000, less than one context of 6000 tokens"),
        ({"kv_tokens": 4_000_000}, r"keys and values of 4000000 tokens need 3.73 GiB, 1.80 GiB can be used"),
        ({"max_running_requests": 4000}, r"4000 running requests and 8000 snapshots need"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(settings: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        plan_cache(config(**settings), 8192, token_bytes=1000, state_bytes=1 << 20, available=2 * GIB)
    assert error.value.next_step


def test_too_little_memory_for_any_useful_context() -> None:
    with pytest.raises(ConfigError, match="at least 1024 are needed"):
        plan_cache(config(), 8192, token_bytes=1 << 20, state_bytes=0, available=1 * GIB)


def test_a_model_without_keys_and_values_is_bounded_by_its_context() -> None:
    plan = plan_cache(config(max_running_requests=4), 4096, 0, 1000, 1 * GIB)
    assert (plan.context.value, plan.kv_tokens.value) == (4096, 4 * 4096)


def test_configuration_survives_the_command_line_and_refuses_nonsense() -> None:
    original = config(context=5, dtype="bfloat16", snapshot_bytes=0, step_seconds=0.25)
    assert EngineConfig.from_json(original.to_json()) == original
    for text in (
        "",
        "[]",
        '{"model_dir": 3}',
        '{"model_dir": "x", "colour": 1}',
        '{"model_dir": "x", "dtype": "int4"}',
    ):
        with pytest.raises(ConfigError):
            EngineConfig.from_json(text)
    for values in ({"context": 1}, {"threads": 0}, {"page_size": 0}, {"step_seconds": 0.0}, {"snapshot_bytes": -1}):
        (name,) = values
        with pytest.raises(ConfigError, match=name):
            config(**values)
    values = config(moe_backend="hybrid", moe_cache_rate=0.25, memory_ratio=0.5, device="cuda", cache_device=0)
    assert EngineConfig.from_json(values.to_json()) == values
    assert facts(threads=Resolved(2, "asked for")) == {"threads": {"value": 2, "reason": "asked for"}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"moe_cache_size": -1}, "moe_cache_size is -1; it must be at least 0"),
        ({"moe_cache_rate": 1.1}, "moe_cache_rate is 1.1; it must be a share from 0 to 1"),
        ({"moe_cache_rate": float("nan")}, "moe_cache_rate is nan"),
        ({"memory_ratio": 0.0}, "memory_ratio is 0.0; it must be a share from 0.05 to 1"),
        ({"moe_cpu_threads": 0}, "moe_cpu_threads is 0; it must be at least 1"),
        ({"moe_cache_size": 1, "moe_cache_rate": 0.5}, "moe_cache_size and moe_cache_rate both say"),
        ({"moe_cache_mem": 1, "moe_backend": "resident"}, "with moe_backend resident the GPU holds all experts"),
        ({"moe_cache_rate": 0.5, "moe_backend": "cpu"}, "with moe_backend cpu the GPU holds no experts"),
    ],
)
def test_settings_of_a_gpu_that_contradict_each_other(values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**values)


def test_threads_are_those_of_the_affinity_unless_asked_for() -> None:
    assert resolve_threads(3) == Resolved(3, "asked for")
    assert 1 <= resolve_threads(None).value <= machine.usable_cpus()


def _write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


def test_cgroup_v2_limits_of_this_group_and_its_parents(tmp_path: Path) -> None:
    """A hand-made hierarchy in the form of the kernel's cgroup-v2 documentation."""
    _write(tmp_path / "a", memory__max="1000\n", memory__current="700\n", memory__stat="anon 5\ninactive_file 100\n")
    _write(tmp_path / "a", cpu__max="150000 100000\n")
    _write(tmp_path / "a/b", memory__max="max\n", memory__current="600\n", cpu__max="max 100000\n")
    assert machine.cgroup_memory(tmp_path, "0::/a/b\n") == 400
    assert machine.cgroup_cpus(tmp_path, "0::/a/b\n") == 2
    assert machine.cgroup_memory(tmp_path, "0::/elsewhere\n") is None
    assert machine.cgroup_cpus(tmp_path, "0::/elsewhere\n") is None


def test_cgroup_v1_limits(tmp_path: Path) -> None:
    stat = "inactive_file 9\ntotal_inactive_file 30\n"
    _write(tmp_path / "memory/x", memory__limit_in_bytes="500", memory__usage_in_bytes="100", memory__stat=stat)
    _write(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="5")
    _write(tmp_path / "cpu", **{"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"})
    _write(tmp_path / "cpu/x", **{"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"})
    membership = "4:memory:/x\n2:cpu,cpuacct:/x\n"
    assert machine.cgroup_memory(tmp_path, membership) == 430
    assert machine.cgroup_cpus(tmp_path, membership) == 1


def test_available_memory_is_what_the_machine_says() -> None:
    amount, source = machine.available_memory()
    assert 0 < amount < 1 << 50
    assert "memory" in source
