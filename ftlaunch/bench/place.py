"""Where the server to be measured is: one that runs, one at an address, or one that is started for it and stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from ftengine.errors import FtError
from ftlaunch.bench.client import Target, ask, get
from ftlaunch.servers.options import ServeOptions
from ftlaunch.servers.record import ServerRecord

Show = Callable[[str, float], None]


class Place(Protocol):
    @property
    def what(self) -> str:
        """In words: an address, or flags."""

    def open(self, show: Show) -> AbstractContextManager[Target]:
        """A server that is ready, for the `with` block. Raises FtError."""


@dataclass(frozen=True)
class Standing:
    """A server that runs and goes on running."""

    target: Target

    @property
    def what(self) -> str:
        return f"{self.target.model} at {self.target.url}"

    def open(self, show: Show) -> AbstractContextManager[Target]:
        return nullcontext(self.target)


@dataclass(frozen=True)
class Started:
    """One of its own, with these flags. `options` name the model by its folder or file."""

    model: str  # as typed
    flags: str
    options: ServeOptions

    @property
    def what(self) -> str:
        return f"{self.model} {self.flags}".rstrip()

    @contextmanager
    def open(self, show: Show) -> Iterator[Target]:
        from ftlaunch.servers import wait_ready

        with self.start() as record:
            wait_ready(record, show)
            yield target_of(record)

    @contextmanager
    def start(self) -> Iterator[ServerRecord]:
        """It listens; the model is not loaded yet."""
        from ftlaunch.servers import stop
        from ftlaunch.servers.start import start_own

        with ExitStack() as hold:
            record = start_own(self.options, hold)
            try:
                yield record
            finally:
                stop(record)


def running(record: ServerRecord) -> Standing:
    """Waits until it is ready. Raises FtError."""
    from ftlaunch.servers import wait_ready

    wait_ready(record)
    return Standing(target_of(record))


def address(url: str, api_key: str | None) -> Standing:
    """A server of any make. Raises FtError where none answers."""
    if not _is_address(url):
        raise FtError(f"{url} is not an address such as http://127.0.0.1:1919", "--url http://HOST:PORT")
    base = Target(url.rstrip("/").removesuffix("/v1"), "", api_key)
    status, answer = ask(base, "/v1/models")
    models = answer.get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
        if status in (401, 403):
            raise FtError(f"{base.url} wants another key (HTTP {status})", "FT_API_KEY, or --api-key")
        raise FtError(f"{base.url}/v1/models names no model (HTTP {status})", "look at the address")
    return Standing(replace(base, model=str(models[0]["id"])))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # no port, or no address in brackets
        return False


def target_of(record: ServerRecord) -> Target:
    return Target(record.url, record.served_name, record.api_key, record.log)


def description(target: Target) -> dict[str, Any]:
    """What the server tells of itself; empty for one that is not ft's."""
    health, stats = get(target, "/health"), get(target, "/v1/stats")
    names = ("architecture", "dtype", "device", "context_length", "max_running_requests")
    found = {name: health[name] for name in names if health.get(name) is not None}
    facts = stats.get("facts") if isinstance(stats.get("facts"), dict) else None
    if facts and isinstance(facts.get("moe_backend"), dict):
        found["moe_backend"] = facts["moe_backend"].get("value")
    if experts := expert_counts(stats):
        found |= {"slots": experts["slots"], "pool": experts["pool"]}
    return found


def expert_counts(stats: dict[str, Any]) -> dict[str, Any]:
    """The engine's counters of its cache of experts; empty where there is none."""
    engine = stats.get("engine")
    experts = engine.get("experts") if isinstance(engine, dict) else None
    return experts if isinstance(experts, dict) and {"slots", "pool", "total"} <= experts.keys() else {}
