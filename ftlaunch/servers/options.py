"""What a server is started with, as flags say it."""

from __future__ import annotations

from dataclasses import dataclass, fields

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 1919

ALWAYS = ("model", "host", "port")
NO_VALUE = ("api_key", "leased")  # one is secret, the other a switch


@dataclass(frozen=True)
class ServeOptions:
    """The options of `ft serve`. None: the server chooses and says why."""

    model: str
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None
    served_model_name: str | None = None
    context: int | None = None  # tokens
    max_running_requests: int | None = None
    max_output_tokens: int | None = None
    max_prefill_length: int | None = None  # tokens
    dtype: str = "auto"
    threads: int | None = None
    device: str = "auto"
    memory_ratio: float | None = None
    kv_tokens: int | None = None
    cache_device: int | None = None  # bytes
    cache_host: int | None = None  # bytes
    cache_disk: int | None = None  # bytes
    moe_backend: str = "auto"
    moe_cache_size: int | None = None  # experts
    moe_cache_rate: float | None = None
    moe_cache_mem: int | None = None  # bytes
    moe_cpu_threads: int | None = None
    background: str | None = None  # id of a server that `start_background` started
    leased: bool = False

    def arguments(self) -> list[str]:
        """The flags that say the same. Without the key: other users can read a process's arguments."""
        result = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ALWAYS or (field.name not in NO_VALUE and value != field.default):
                result += [f"--{field.name.replace('_', '-')}", str(value)]
        return [*result, "--leased"] if self.leased else result
