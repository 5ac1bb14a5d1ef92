"""Resolves the engine's settings against this machine's memory, each value with its reason; refuses with numbers.

Two moments: `check_context` and `check_memory` before loading, `plan_cache` when the model is loaded and its
CacheLayout is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.memory.machine import cgroup_cpus, cpu_flags, usable_cpus

BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
GIB = 1 << 30

DEFAULT_CONTEXT = 131072  # tokens; agents' sessions rarely grow longer, and keys and values of more cost gigabytes
DEFAULT_RUNNING = 8
SMALLEST_CONTEXT = 1024  # tokens; less is refused rather than served
KV_SHARE = 0.6  # of the memory left after the weights
SNAPSHOT_SHARE = 0.1
SNAPSHOT_CAP = 8 * GIB
PREFILL_CHUNK = 2048  # tokens


def resolve_dtype(asked: str, flags: frozenset[str] | None = None, device: str = "cpu") -> Resolved[str]:
    """The dtype of activations, keys and values. Weights keep the format they are stored in."""
    if asked != "auto":
        return Resolved(asked, "asked for")
    if device != "cpu":
        return Resolved("bfloat16", "default on a GPU")
    native = next((flag for flag in BFLOAT16_FLAGS if flag in (cpu_flags() if flags is None else flags)), None)
    if native is not None:
        return Resolved("bfloat16", f"the CPU has {native}")
    return Resolved("float32", "the CPU has no bfloat16 instructions")


def resolve_threads(asked: int | None) -> Resolved[int]:
    """Compute threads: the CPUs this process may run on, or less where a cgroup limits its CPU time."""
    if asked is not None:
        return Resolved(asked, "asked for")
    allowed, quota = usable_cpus(), cgroup_cpus()
    if quota is not None and quota < allowed:
        return Resolved(quota, "CPU limit of the cgroup")
    return Resolved(allowed, "CPUs this process may use")


def resolve_prefill(config: EngineConfig) -> Resolved[int]:
    """Largest prefill tokens a step, on the CPU."""
    return _asked(config.prefill_chunk) or Resolved(PREFILL_CHUNK, "default")


def usable(available: int) -> int:
    """Bytes to plan with: a tenth of the available memory, at most 2 GiB, stays for activations and the system."""
    return available - min(available // 10, 2 * GIB)


def check_context(config: EngineConfig, checkpoint_context: int) -> None:
    """Raises ConfigError for a context, or KV tokens for less than one, that no amount of memory could serve."""
    if config.context is None:
        return
    if config.context > checkpoint_context:
        raise ConfigError(
            f"a context of {config.context} tokens was asked for, the model holds {checkpoint_context}",
            f"ft serve --context {checkpoint_context}",
        )
    if config.kv_tokens is not None and config.kv_tokens < config.context:
        raise ConfigError(
            f"kv_tokens is {config.kv_tokens}, less than one context of {config.context} tokens",
            f"ft serve --context {config.kv_tokens}",
        )


def check_memory(config: EngineConfig, weights: int, token_bytes: int, available: int, source: str) -> None:
    """Raises ConfigError if weights and the least of a cache cannot fit, before a byte of them is read.

    weights: bytes as they will lie in memory; token_bytes: keys and values of a token; available: bytes, and `source`
    says what bounds them.
    """
    tokens = config.kv_tokens or config.context or SMALLEST_CONTEXT
    if weights + tokens * token_bytes > usable(available):
        raise ConfigError(
            f"the weights need {gigabytes(weights)} and {tokens} tokens of keys and values "
            f"{gigabytes(tokens * token_bytes)}, but of {gigabytes(available)} available ({source}) "
            f"{gigabytes(usable(available))} can be used",
            "ft list",
        )


def check_banks(banks: int, available: int, source: str) -> None:
    """Raises ConfigError if the routed experts, `banks` bytes in host memory also beside a GPU, cannot fit there."""
    if banks > usable(available):
        raise ConfigError(
            f"the routed experts need {gigabytes(banks)} of memory, but of {gigabytes(available)} available ({source}) "
            f"{gigabytes(usable(available))} can be used",
            "ft list",
        )


@dataclass(frozen=True)
class CachePlan:
    context: Resolved[int]
    max_running: Resolved[int]
    kv_tokens: Resolved[int]  # a multiple of the page size
    state_slots: Resolved[int]  # running states and snapshots together; 0 for models without recurrent state


def plan_cache(
    config: EngineConfig, checkpoint_context: int, token_bytes: int, state_bytes: int, available: int
) -> CachePlan:
    """Divides the memory left after the weights.

    token_bytes: keys and values of one token over all layers; state_bytes: one sequence's recurrent state;
    available: bytes. Raises ConfigError if what was asked for, or the least that is useful, does not fit.
    """
    max_running = _asked(config.max_running_requests) or Resolved(DEFAULT_RUNNING, "default")
    room = usable(available)
    slots = _state_slots(config, max_running.value, state_bytes, room)
    affordable = _affordable(room - slots.value * state_bytes, token_bytes)
    context = _context(config, checkpoint_context, affordable, token_bytes, available)
    kv_tokens = _kv_tokens(config, context.value, max_running.value, affordable, token_bytes, available)
    return CachePlan(context, max_running, kv_tokens, slots)


def gigabytes(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _asked(value: int | None) -> Resolved[int] | None:
    return None if value is None else Resolved(value, "asked for")


def _affordable(room: int, token_bytes: int) -> int | None:
    """Tokens of keys and values by default; None for models that keep none."""
    return int(max(room, 0) * KV_SHARE) // token_bytes if token_bytes else None


def _state_slots(config: EngineConfig, running: int, state_bytes: int, room: int) -> Resolved[int]:
    if not state_bytes:
        return Resolved(0, "the model has no recurrent state")
    if config.snapshot_bytes is not None:
        snapshots, reason = config.snapshot_bytes // state_bytes, "asked for"
    else:
        share = min(int(room * SNAPSHOT_SHARE), SNAPSHOT_CAP)
        # Each running sequence keeps one at the end of its prompt and one that moves along.
        snapshots = max(share // state_bytes, 2 * running)
        reason = f"{running} running, {snapshots} snapshots of {state_bytes / (1 << 20):.1f} MiB for prefix reuse"
    needed = (running + snapshots) * state_bytes
    if needed > room:
        raise ConfigError(
            f"recurrent states of {running} running requests and {snapshots} snapshots need {gigabytes(needed)}, "
            f"{gigabytes(max(room, 0))} can be used",
            "ft serve --max-running-requests 1",
        )
    return Resolved(running + snapshots, reason)


def _context(
    config: EngineConfig, checkpoint_context: int, affordable: int | None, token_bytes: int, available: int
) -> Resolved[int]:
    check_context(config, checkpoint_context)
    if config.context is not None:
        return Resolved(config.context, "asked for")
    choices = [Resolved(checkpoint_context, "the checkpoint's limit"), Resolved(DEFAULT_CONTEXT, "default")]
    if config.kv_tokens is not None:
        choices.append(Resolved(config.kv_tokens, "as many as kv_tokens"))
    elif affordable is not None:
        choices.append(Resolved(affordable, f"what {gigabytes(available)} of available memory allow"))
        if affordable < min(SMALLEST_CONTEXT, checkpoint_context):
            raise ConfigError(
                f"{gigabytes(available)} of available memory hold keys and values of {affordable} tokens "
                f"({token_bytes} bytes each); at least {SMALLEST_CONTEXT} are needed",
                "ft list",
            )
    return min(choices, key=lambda choice: choice.value)


def _kv_tokens(
    config: EngineConfig, context: int, running: int, affordable: int | None, token_bytes: int, available: int
) -> Resolved[int]:
    if config.kv_tokens is not None:
        wanted = Resolved(config.kv_tokens, "asked for")
    elif affordable is None or affordable >= context * running:
        wanted = Resolved(context * running, f"{running} contexts of {context}")
    else:
        wanted = Resolved(max(context, affordable), f"what {gigabytes(available)} of available memory allow")
    tokens = -(-wanted.value // config.page_size) * config.page_size
    if tokens * token_bytes > usable(available):
        raise ConfigError(
            f"keys and values of {tokens} tokens need {gigabytes(tokens * token_bytes)}, "
            f"{gigabytes(usable(available))} can be used",
            f"ft serve --context {max(affordable or 0, SMALLEST_CONTEXT)}",
        )
    return Resolved(tokens, wanted.reason)
