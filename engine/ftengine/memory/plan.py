"""Resolves the engine's settings against this machine's memory, each value with its reason; refuses with numbers.

Two moments: `check_context` and `check_memory` before loading, `plan_cache` when the model is loaded and its
CacheLayout is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.memory.machine import ADDRESS_LIMIT, NO_ADDRESS_LIMIT, cgroup_cpus, cpu_flags, usable_cpus
from ftengine.memory.prompts import Below, plan_anchors, plan_below, slot_bytes, slots_running
from ftengine.memory.sizes import GIB, gigabytes, typed

BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")
ITEM_BYTES = {"float32": 4, "bfloat16": 2}

DEFAULT_CONTEXT = 131072  # tokens; agents' sessions rarely grow longer, and keys and values of more cost gigabytes
DEFAULT_RUNNING = 8
SMALLEST_CONTEXT = 1024  # tokens; less is refused rather than served
KV_SHARE = 0.6  # of the memory left after the weights
ANCHOR_SHARE = 4  # 1/4 of the same is for anchors by default: there is no tier in host memory besides
PREFILL_CHUNK = 2048  # tokens
MANY_CPUS = 8
ALL_CPUS = "CPUs this process may use"


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
    """Compute threads: the CPUs this process may run on, or less where a cgroup limits its CPU time.

    Never more than there are CPUs: each step would wait for threads that wait for each other's core.
    """
    allowed = usable_cpus()
    if asked is not None:
        return Resolved(asked, "asked for") if asked <= allowed else Resolved(allowed, f"{asked} asked for, {ALL_CPUS}")
    quota = cgroup_cpus()
    if quota is not None and quota < allowed:
        return Resolved(quota, "CPU limit of the cgroup")
    return Resolved(allowed, ALL_CPUS)


def lane_threads(config: EngineConfig) -> Resolved[int]:
    """Of those that compute experts beside a GPU."""
    if config.moe_cpu_threads is not None:
        return resolve_threads(config.moe_cpu_threads)
    if config.threads is not None:
        return Resolved(resolve_threads(config.threads).value, "as many as threads")
    return default_lane_threads()


def default_lane_threads() -> Resolved[int]:
    """Where nothing else was asked for: also what lanes are measured with before there is a model.

    Where there are MANY_CPUS, two are left to the engine's other threads (scheduler/cores.py keeps them there) and the
    server: with one, a thread of the lane lost its core for 3-4 ms now and then, and the step waited for it. On 16 CPUs
    beside an H200, a quarter of the experts in slots: 264 tokens/s, 54 ms at worst between two tokens with 15 threads,
    274 and 15 with 14, 272 and 14 with 12.
    """
    cpus = resolve_threads(None)
    left, words = (2, "two") if cpus.value >= MANY_CPUS else (1, "one")
    return Resolved(max(1, cpus.value - left), f"{cpus.reason}, less {words}")


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
    kept, room = tokens * token_bytes, usable(available)
    least = weights + kept
    whole = f"the weights need {gigabytes(weights)} and {tokens} tokens of keys and values {gigabytes(kept)}"
    limit = f"of {gigabytes(available)} available ({source}) {gigabytes(room)} can be used"
    if least > room:
        raise ConfigError(f"{whole}, but {limit}", _mend(config, room - weights, token_bytes, source))
    for name in ("cache_device", "cache_host"):
        asked = getattr(config, name) or 0
        if least + asked > room:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{whole}, and {flag} is {gigabytes(asked)}, but {limit}", f"ft serve {flag} {typed(room - least)}"
            )
        least += asked


def _mend(config: EngineConfig, room: int, token_bytes: int, source: str) -> str:
    if source == ADDRESS_LIMIT:
        return NO_ADDRESS_LIMIT
    return _fewer_tokens(config, room, token_bytes) or "ft list"


def _fewer_tokens(config: EngineConfig, room: int, token_bytes: int) -> str:
    """The command with as many tokens as `room` bytes hold, as many as there were by default; empty if too few do."""
    tokens = _affordable(room, token_bytes) or 0
    tokens -= tokens % config.page_size
    if tokens < SMALLEST_CONTEXT:
        return ""
    flags = [name for name in ("kv_tokens", "context") if (getattr(config, name) or 0) > tokens]
    return " ".join(["ft serve", *(f"--{name.replace('_', '-')} {tokens}" for name in flags)]) if flags else ""


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
    state_slots: Resolved[int]  # of running sequences and anchors together
    cache_device: Resolved[int]  # bytes that the anchors among them may take
    below: Below  # tiers for prompts in host memory and files


def plan_cache(
    config: EngineConfig, checkpoint_context: int, token_bytes: int, state_bytes: int, available: int
) -> CachePlan:
    """Divides the memory left after the weights.

    token_bytes: keys and values of one token over all layers; state_bytes: one sequence's recurrent state;
    available: bytes. Raises ConfigError if what was asked for, or the least that is useful, does not fit.
    """
    max_running = _asked(config.max_running_requests) or Resolved(DEFAULT_RUNNING, "default")
    slot = slot_bytes(token_bytes, state_bytes, config.page_size)
    room = usable(available)
    below = plan_below(config, token_bytes, state_bytes, room, device="cpu")
    room -= below.memory
    kept = (config.kv_tokens or config.context or 0) * token_bytes
    anchors = _anchors(config, max_running.value, slot, state_bytes, room, kept)
    running = slots_running(state_bytes, max_running.value)
    slots = running + anchors.value
    left = room - slots * slot
    affordable = _affordable(left, token_bytes)
    context = _context(config, checkpoint_context, affordable, token_bytes, available)
    wanted = _kv_tokens(config, context.value, max_running.value, affordable, available)
    kv_tokens = _fitting(config, wanted, affordable, token_bytes, left)
    why = f"{running} running, {anchors.value} anchors ({anchors.reason})"
    device = _asked(config.cache_device) or Resolved(anchors.value * slot, anchors.reason)
    return CachePlan(context, max_running, kv_tokens, Resolved(slots, why), device, below)


def _asked(value: int | None) -> Resolved[int] | None:
    return None if value is None else Resolved(value, "asked for")


def _affordable(room: int, token_bytes: int) -> int | None:
    """Tokens of keys and values by default; None for models that keep none."""
    return int(max(room, 0) * KV_SHARE) // token_bytes if token_bytes else None


def _anchors(config: EngineConfig, running: int, slot: int, state: int, room: int, kept: int) -> Resolved[int]:
    """slot: bytes of one anchor, or of one running sequence's state; kept: of keys and values that were asked for."""
    taken = slots_running(state, running) * slot
    left = room - taken
    anchors = plan_anchors(
        config, left - kept, slot, state=state, running=running, share=ANCHOR_SHARE, floor=ANCHOR_SHARE
    )
    if anchors.value * slot > left:
        needed = taken + anchors.value * slot
        raise ConfigError(
            f"states of {running} running requests and {anchors.value} anchors need {gigabytes(needed)}, "
            f"{gigabytes(max(room, 0))} can be used",
            "ft serve --max-running-requests 1" if left < slot else f"ft serve --cache-device {typed(left)}",
        )
    return anchors


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
    config: EngineConfig, context: int, running: int, affordable: int | None, available: int
) -> Resolved[int]:
    if config.kv_tokens is not None:
        return Resolved(config.kv_tokens, "asked for")
    if affordable is None or affordable >= context * running:
        return Resolved(context * running, f"{running} contexts of {context}")
    return Resolved(max(context, affordable), f"what {gigabytes(available)} of available memory allow")


def _fitting(
    config: EngineConfig, wanted: Resolved[int], affordable: int | None, token_bytes: int, room: int
) -> Resolved[int]:
    """In whole pages. Raises ConfigError if their `token_bytes` each are more than `room`."""
    tokens = -(-wanted.value // config.page_size) * config.page_size
    if tokens * token_bytes > max(room, 0):
        raise ConfigError(
            f"keys and values of {tokens} tokens need {gigabytes(tokens * token_bytes)}, "
            f"{gigabytes(max(room, 0))} can be used",
            _fewer_tokens(config, room, token_bytes) or f"ft serve --context {max(affordable or 0, SMALLEST_CONTEXT)}",
        )
    return Resolved(tokens, wanted.reason)
