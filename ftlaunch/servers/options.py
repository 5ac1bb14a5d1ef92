"""What a server is started with, as flags say it."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 1919


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
    dtype: str = "auto"
    threads: int | None = None
    background: str | None = None  # id of a server that `start_background` started
    leased: bool = False

    def arguments(self) -> list[str]:
        """The flags that say the same. Without the key: other users can read a process's arguments."""
        result = ["--model", self.model, "--host", self.host, "--port", str(self.port), "--dtype", self.dtype]
        for flag, value in (
            ("--served-model-name", self.served_model_name),
            ("--context", self.context),
            ("--max-running-requests", self.max_running_requests),
            ("--max-output-tokens", self.max_output_tokens),
            ("--threads", self.threads),
            ("--background", self.background),
        ):
            if value is not None:
                result += [flag, str(value)]
        return [*result, "--leased"] if self.leased else result
