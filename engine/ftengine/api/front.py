"""What the endpoints share: settings, engine, generator, totals."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from ftengine.api.calls import Call, Totals
from ftengine.api.engine_client import EngineClient, EngineState
from ftengine.api.generate import Generator
from ftengine.api.settings import ServeSettings
from ftengine.errors import BadRequest, FtError, NotFound, TooLarge

SCHEMA_VERSION = 1  # of /health and /v1/stats; docs/api.md describes it


class Front:
    """Made once a server."""

    def __init__(self, settings: ServeSettings, engine: EngineClient) -> None:
        self.settings = settings
        self.engine = engine
        self.generator = Generator(settings, engine)
        self.totals = Totals()
        self.failure: FtError | None = None  # why this server cannot start
        self.stopping = False

    def call(self, api: str, request: Request) -> Call:
        return Call(api, client_name(request), self.totals)

    def check_model(self, name: str | None) -> None:
        """One model is served; a request may leave its name out. Raises NotFound for another one."""
        if name is not None and name != self.settings.served_name:
            raise NotFound(
                f"the model {name[:100]!r} is not served here; this server has {self.settings.served_name!r}",
                param="model",
            )

    def check_counts(self, messages: Sequence[Any], tools: Sequence[Any], *, field: str = "messages") -> None:
        """Raises BadRequest or TooLarge, before anything is rendered."""
        limits = self.settings.limits
        if not messages:
            raise BadRequest(f"{field}: at least one is needed", param=field)
        if len(messages) > limits.messages:
            raise TooLarge(f"{field}: {len(messages)} given, the limit is {limits.messages}", param=field)
        if len(tools) > limits.tools:
            raise TooLarge(f"tools: {len(tools)} given, the limit is {limits.tools}", param="tools")

    def check_choices(self, count: int, field: str) -> None:
        """Raises BadRequest for more answers to one request than the limit."""
        limit = self.settings.limits.choices
        if count > limit:
            raise BadRequest(f"{field}: {count} answers asked for, the limit is {limit}", param=field)

    def stops(self, given: str | Sequence[str] | None, field: str) -> tuple[str, ...]:
        """Stop strings, empty ones left out. Raises BadRequest."""
        limits = self.settings.limits
        stops = (given,) if isinstance(given, str) else tuple(given or ())
        if len(stops) > limits.stop_strings:
            raise BadRequest(f"{field}: {len(stops)} given, the limit is {limits.stop_strings}", param=field)
        if any(len(stop) > limits.stop_characters for stop in stops):
            raise BadRequest(f"{field}: longer than {limits.stop_characters} characters", param=field)
        return tuple(stop for stop in stops if stop)

    def health(self) -> dict[str, Any]:
        """See docs/api.md. Answers at any time, from the first moment to the last."""
        engine, ready = self.engine, self.engine.ready
        failure = self.failure or engine.failure
        error = failure or engine.trouble
        status = "stopping" if self.stopping else "failed" if failure else _STATUS[engine.state]
        stage = engine.stage
        if status == "ready" and not self.generator.open_done:
            status, stage = "loading", "opening the tokenizer"
        return {
            "version": SCHEMA_VERSION,
            "status": status,
            "stage": stage,
            "progress": round(engine.progress, 4),
            "model": self.settings.served_name,
            "context_length": context_length(engine),
            "max_output_tokens": self.settings.max_output_tokens,
            "max_running_requests": ready.max_running if ready else None,
            "architecture": ready.architecture if ready else None,
            "dtype": ready.dtype if ready else None,
            "device": ready.device if ready else None,
            "error": {"message": str(error), "next_step": error.next_step} if error else None,
            "restarts": engine.restarts,
            "pid": os.getpid(),
            "engine_pid": engine.pid,
            "uptime_seconds": round(time.time() - self.totals.started, 3),
        }


_STATUS = {
    EngineState.LOADING: "loading",
    EngineState.READY: "ready",
    EngineState.RESTARTING: "restarting",
    EngineState.FAILED: "failed",
    EngineState.STOPPED: "stopping",
}


def context_length(engine: EngineClient) -> int | None:
    """Tokens that one conversation may have, prompt and output together; None until the engine has said."""
    if engine.ready is None:
        return None
    return min(engine.ready.context_length, engine.ready.kv_tokens or engine.ready.context_length)


def client_name(request: Request) -> str:
    return request.client.host if request.client else "-"
