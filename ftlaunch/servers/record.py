"""What is known of a server that runs, and its JSON form on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ServerRecord:
    """One running server. Set by the server process itself."""

    id: str
    pid: int  # of the front process; the engine is its child
    host: str
    port: int
    model: str  # store name, or absolute path of a model directory
    served_name: str  # the model's id in the APIs
    log: Path | None  # None: it logs to the terminal it was started in
    started: float  # Unix time, seconds
    api_key: str | None
    lease_dir: Path | None  # None: it lives until it is stopped

    @property
    def url(self) -> str:
        """Base URL without a trailing slash or `/v1`; a wildcard bind is reached through loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def encode(record: ServerRecord) -> bytes:
    import msgspec

    return msgspec.json.encode(record, enc_hook=str)


def decode(data: bytes) -> ServerRecord:
    """Raises ValueError for anything but a record."""
    import msgspec

    def path(kind: type, value: Any) -> Any:
        if kind is Path and isinstance(value, str):
            return Path(value)
        raise NotImplementedError(kind)

    return msgspec.json.decode(data, type=ServerRecord, dec_hook=path)
