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


class Resolved(msgspec.Struct, Generic[T], frozen=True):
    """A setting's value and, in a few words, where it came from."""

    value: T
    reason: str


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked of the engine process; crosses as one JSON argument. Raises ConfigError for impossible values."""

    model_dir: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    context: int | None = None  # tokens a sequence may have, prompt and output together
    max_running_requests: int | None = None
    kv_tokens: int | None = None  # tokens whose keys and values fit, over all sequences and the prefix cache
    page_size: int = 16  # tokens a KV page
    prefill_chunk: int = 2048  # largest prefill tokens a step; the engine goes lower to keep `step_seconds`
    step_seconds: float = 0.8  # how long a step with prefill may take: bounds cancellation and decode latency
    threads: int | None = None
    snapshot_bytes: int | None = None  # recurrent states kept for prefix reuse; 0: none
    log_seconds: float = 5.0  # between two progress lines while there is work

    def __post_init__(self) -> None:
        least = {
            "context": 2,
            "max_running_requests": 1,
            "kv_tokens": 2,
            "page_size": 1,
            "prefill_chunk": 1,
            "threads": 1,
            "snapshot_bytes": 0,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name} is {value}; it must be at least {minimum}")
        for name in ("step_seconds", "log_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; it must be a positive number of seconds")

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
