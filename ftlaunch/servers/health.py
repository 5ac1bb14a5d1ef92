"""Asking a server how it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ftengine.errors import FtError
from ftlaunch.servers.ask import ask
from ftlaunch.servers.record import ServerRecord
from ftlaunch.servers.registry import is_alive

Progress = Callable[[str, float], None]
POLL_SECONDS = 0.2


def health(record: ServerRecord, timeout: float = 2.0) -> dict[str, Any] | None:
    """The body of `/health` (docs/api.md), or None when there is no answer. `timeout` in seconds."""
    return ask(record, "/health", timeout)


def state(answer: dict[str, Any] | None) -> str:
    """In one or a few words: `ready`, `loading 40%: reading weights`, `no answer`; with the reason where it fails."""
    if answer is None:
        return "no answer"
    status = str(answer.get("status", "unknown"))
    if (error := answer.get("error")) and isinstance(error, dict):
        return f"{status}: {error.get('message')}"
    if status in ("loading", "restarting"):
        return f"{status} {float(answer.get('progress') or 0):.0%}: {answer.get('stage', '')}".rstrip(": ")
    return status


def wait_ready(record: ServerRecord, on_progress: Progress = lambda stage, done: None) -> dict[str, Any]:
    """Wait until the model is loaded; `on_progress(stage, fraction 0..1)` tells how far it is. Returns `/health`.

    Raises FtError when the server ends or fails before that. Waits as long as the server lives: how long a model
    loads is known to nobody beforehand.
    """
    while True:
        answer = health(record)
        if answer is not None and answer.get("status") == "ready":
            return answer
        if answer is not None and answer.get("status") == "failed":
            error = answer.get("error") or {}
            raise FtError(str(error.get("message") or "the server failed to start"), str(error.get("next_step") or ""))
        if not is_alive(record):
            raise FtError(f"the server of {record.served_name} ended before it was ready", log_hint(record))
        if answer is not None:
            on_progress(str(answer.get("stage") or "loading"), float(answer.get("progress") or 0.0))
        time.sleep(POLL_SECONDS)


def log_hint(record: ServerRecord) -> str:
    return f"see its log: {record.log}" if record.log else "look at the terminal it runs in"
