"""The engine's settings: frozen, torch-free, each automatic value resolved once and kept with its reason.

`EngineConfig` is what the front asks for (`None` or "auto": choose); `ftengine.memory.plan` resolves it in the engine
process. Knows nothing of models or of this machine.
"""

from __future__ import annotations

import math
from typing import Any, Generic, Literal, TypeVar

import msgspec

from ftengine.errors import ConfigError

T = TypeVar("T")

LEAST = {
    "context": 2,
    "max_running_requests": 1,
    "kv_tokens": 2,
    "page_size": 1,
    "prefill_chunk": 1,
    "threads": 1,
    "cache_device": 0,
    "cache_host": 0,
    "cache_disk": 0,
    "moe_cache_size": 0,
    "moe_cache_mem": 0,
    "moe_cpu_threads": 1,
}
SHARES = {"memory_ratio": (0.05, 1.0), "moe_cache_rate": (0.0, 1.0)}  # not a number is in none of them
CACHE_SIZES = ("moe_cache_size", "moe_cache_rate", "moe_cache_mem")


class Resolved(msgspec.Struct, Generic[T], frozen=True):
    """A setting's value and, in a few words, where it came from."""

    value: T
    reason: str


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked of the engine process; crosses as one JSON argument. Raises ConfigError for impossible values."""

    model_dir: str
    model_name: str = ""  # for people, in lists of kept prompts; "": the folder's
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cuda", "cpu", "interpret"] = "auto"  # interpret: the GPU's code on the CPU, for tests
    context: int | None = None  # tokens a sequence may have, prompt and output together
    max_running_requests: int | None = None
    kv_tokens: int | None = None  # tokens whose keys and values fit, over all sequences and the prefix cache
    page_size: int = 16  # tokens a KV page
    prefill_chunk: int | None = None  # largest prefill tokens a step; the engine goes lower to keep `step_seconds`
    step_seconds: float = 0.8  # how long a step with prefill may take: bounds cancellation and decode latency
    threads: int | None = None
    log_seconds: float = 5.0  # between two progress lines while there is work
    memory_ratio: float | None = None  # share of the GPU's free memory that is used
    cache_device: int | None = None  # bytes where the model computes, for places that prompts go on from; 0: none
    cache_host: int | None = None  # bytes of host memory for copies of prompts; 0: none
    cache_disk: int | None = None  # bytes of files of prompts, for the next start; 0: none
    cache_dir: str | None = None  # the folder of these files; without one there are none
    moe_backend: Literal["auto", "resident", "offload", "cpu", "hybrid"] = "auto"  # where routed experts are computed
    moe_cache_size: int | None = None  # experts that the GPU's memory holds; of the three at most one is given
    moe_cache_rate: float | None = None  # the same as a share of all routed experts
    moe_cache_mem: int | None = None  # the same in bytes
    moe_cpu_threads: int | None = None  # that compute experts beside the GPU

    def __post_init__(self) -> None:
        for name, minimum in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{name} is {value}; it must be at least {minimum}", f"ft serve {flag} {minimum}")
        for name, (lowest, highest) in SHARES.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise ConfigError(f"{name} is {value}; it must be a share from {lowest:g} to {highest:g}")
        for name in ("step_seconds", "log_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; it must be a positive number of seconds")
        if self.cache_disk and self.cache_dir is None:
            raise ConfigError(f"cache_disk is {self.cache_disk}, but there is no cache_dir to keep files in")
        self._check_experts()

    def _check_experts(self) -> None:
        given = [name for name in CACHE_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both say how many experts the GPU holds; give one of them")
        if given and self.moe_backend in ("resident", "cpu"):
            held = "all experts" if self.moe_backend == "resident" else "no experts"
            raise ConfigError(
                f"{given[0]} is given, but with moe_backend {self.moe_backend} the GPU holds {held}",
                "ft serve --moe-backend hybrid",
            )

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> EngineConfig:
        """Raises ConfigError, also for text that is not such a JSON object."""
        try:
            return msgspec.json.decode(text, type=EngineConfig)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the engine's configuration is not readable: {error}") from error


def facts(**values: Resolved[Any]) -> dict[str, Any]:
    """For `Ready.facts`: name -> {"value", "reason"}."""
    return {name: {"value": entry.value, "reason": entry.reason} for name, entry in values.items()}
