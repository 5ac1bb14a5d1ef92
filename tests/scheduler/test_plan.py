"""How settings are resolved against memory: sums checked by hand, refusals by their numbers."""

from __future__ import annotations

import subprocess
import sys
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
    check_memory(config(cache_device=GIB // 2, cache_host=GIB // 2), 8 * GIB, token_bytes=0, **arguments)
    with pytest.raises(ConfigError, match=r"the weights need 8.00 GiB .* and --cache-host is 1.00 GiB, but") as error:
        check_memory(config(cache_device=GIB // 2, cache_host=GIB), 8 * GIB, token_bytes=0, **arguments)
    assert error.value.next_step == "ft serve --cache-host 512MiB"


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
    assert plan.state_slots == Resolved(
        64, "0 running, 64 anchors (the model has no recurrent state: the ends of 64 prompts, 0.0 MiB each)"
    )


def test_a_huge_context_is_cut_by_default_and_kept_when_asked_for() -> None:
    arguments = {"checkpoint_context": 1 << 20, "token_bytes": 20480, "state_bytes": 0, "available": 100 * GIB}
    assert plan_cache(config(), **arguments).context == Resolved(131072, "default")
    assert plan_cache(config(context=500_000), **arguments).context == Resolved(500_000, "asked for")


def test_little_memory_bounds_context_and_kv_tokens() -> None:
    """64 anchors take a page each."""
    plan = plan_cache(config(), checkpoint_context=131072, token_bytes=65536, state_bytes=0, available=4 * GIB)
    assert plan.state_slots.value == 64
    affordable = int((4 * GIB - 4 * GIB // 10 - 64 * 16 * 65536) * 0.6) // 65536
    assert plan.context.value == affordable < 131072
    assert "4.00 GiB" in plan.context.reason
    assert affordable <= plan.kv_tokens.value < affordable + 16
    assert plan.kv_tokens.value % 16 == 0


def test_what_is_planned_fits() -> None:
    for available in (1 * GIB, 5 * GIB, 40 * GIB):
        for state in (0, 1 << 20, 60 << 20):
            try:
                plan = plan_cache(config(max_running_requests=4, cache_host=100 << 20), 262144, 20480, state, available)
            except ConfigError:
                continue
            slots = plan.state_slots.value * (state + 16 * 20480)
            assert plan.kv_tokens.value * 20480 + slots + plan.below.host.value <= usable(available)
            assert plan.below.host.value == 100 << 20
            assert plan.kv_tokens.value >= plan.context.value >= 1024


def test_state_slots_hold_the_running_ones_and_anchors() -> None:
    """10 MiB each, of it a page of 16,000 bytes: 9 GiB less 4 of them, a quarter and at most 8 GiB by default."""
    state = (10 << 20) - 16_000
    automatic = plan_cache(config(max_running_requests=4), 4096, 1000, state, 10 * GIB)
    assert automatic.state_slots.value == 4 + (9 * GIB - (40 << 20)) // 4 // (10 << 20)
    assert automatic.cache_device == Resolved(229 * (10 << 20), "1/4 of 8.96 GiB, 10.0 MiB each")
    assert plan_cache(config(max_running_requests=4), 4096, 1000, 64 * state, 500 * GIB).cache_device.value <= 8 * GIB
    little = plan_cache(config(max_running_requests=4), 4096, 1000, 4 * state, GIB)
    assert little.cache_device == Resolved(4 * (4 * state + 16_000), "1/4 of 0.74 GiB, 40.0 MiB each")
    beside = plan_cache(config(max_running_requests=4, kv_tokens=8_000_000), 8_000_000, 1000, state, 10 * GIB)
    assert beside.cache_device.reason == "1/4 of 1.51 GiB, 10.0 MiB each"  # what was asked for comes first
    asked = plan_cache(config(max_running_requests=4, cache_device=55 << 20), 4096, 1000, state, 10 * GIB)
    assert asked.state_slots.value == 4 + 5
    none = plan_cache(config(max_running_requests=4, cache_device=0), 4096, 1000, state, 10 * GIB)
    assert none.state_slots.value == 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"context": 9000}, "a context of 9000 tokens was asked for, the model holds 8192"),
        ({"kv_tokens": 5000, "context": 6000}, "kv_tokens is 5000, less than one context of 6000 tokens"),
        ({"kv_tokens": 4_000_000}, r"keys and values of 4000000 tokens need 3.73 GiB, 1.79 GiB can be used"),
        ({"max_running_requests": 4000}, r"4000 running requests and 0 anchors need"),
        ({"cache_device": 2 * GIB}, r"8 running requests and 2017 anchors need 2.01 GiB, 1.80 GiB can be used"),
        ({"cache_device": 1 << 20}, r"--cache-device is 1.0 MiB, and one anchor takes 1.0 MiB: it would hold nothing"),
        ({"cache_host": 2 * GIB}, r"2.00 GiB of host memory do not fit: 1.80 GiB are left for it"),
        ({"cache_host": 1 << 20}, r"--cache-host is 1.0 MiB, and an anchor with 1024 tokens .* takes 2.0 MiB"),
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
    original = config(context=5, dtype="bfloat16", cache_device=0, step_seconds=0.25)
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
    for values in ({"context": 1}, {"threads": 0}, {"page_size": 0}, {"step_seconds": 0.0}, {"cache_host": -1}):
        (name,) = values
        with pytest.raises(ConfigError, match=name):
            config(**values)
    values = config(moe_backend="hybrid", moe_cache_rate=0.25, memory_ratio=0.5, device="cuda", cache_host=0)
    assert EngineConfig.from_json(values.to_json()) == values
    assert facts(threads=Resolved(2, "asked for")) == {"threads": {"value": 2, "reason": "asked for"}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"moe_cache_size": -1}, "moe_cache_size is -1; it must be at least 0"),
        ({"moe_cache_rate": 1.1}, "moe_cache_rate is 1.1; it must be a share from 0 to 1"),
        ({"moe_cache_rate": float("nan")}, "moe_cache_rate is nan"),
        ({"memory_ratio": 0.0}, "memory_ratio is 0.0; it must be a share from 0.05 to 1"),
        ({"cache_disk": -1, "cache_dir": "x"}, "cache_disk is -1; it must be at least 0"),
        ({"cache_disk": 1}, "cache_disk is 1, but there is no cache_dir to keep files in"),
        ({"moe_cpu_threads": 0}, "moe_cpu_threads is 0; it must be at least 1"),
        ({"moe_cache_size": 1, "moe_cache_rate": 0.5}, "moe_cache_size and moe_cache_rate both say"),
        ({"moe_cache_mem": 1, "moe_backend": "resident"}, "with moe_backend resident the GPU holds all experts"),
        ({"moe_cache_rate": 0.5, "moe_backend": "cpu"}, "with moe_backend cpu the GPU holds no experts"),
    ],
)
def test_settings_that_contradict_each_other(values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**values)


def test_threads_are_those_of_the_affinity_unless_asked_for() -> None:
    cpus = machine.usable_cpus()
    assert resolve_threads(cpus) == Resolved(cpus, "asked for")
    assert resolve_threads(4096) == Resolved(min(4096, cpus), "4096 asked for, CPUs this process may use")
    assert 1 <= resolve_threads(None).value <= machine.usable_cpus()


def test_an_address_limit_bounds_the_memory_and_is_named() -> None:
    """`ulimit -v`, in a process of its own; what it has mapped already is not there any more."""
    limit = 1 << 30
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); "
        "from ftengine.memory.machine import available_memory; print(*available_memory(), sep=';')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    size, bound = ended.stdout.strip().split(";")
    assert bound == machine.ADDRESS_LIMIT
    assert 0 < int(size) < limit
    with pytest.raises(ConfigError) as caught:
        check_memory(config(), 2 * limit, 1000, int(size), bound)
    assert caught.value.next_step == "ulimit -v unlimited"


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
