"""What the front is told at start. Frozen; the command line fills it in, `server.run` reads it.

Knows nothing of how a value was chosen.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ftengine.config import EngineConfig

MEBIBYTE = 1 << 20


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may ask for. A request over a limit is answered before its text is tokenized."""

    body_bytes: int = 32 * MEBIBYTE
    body_values: int = 1_000_000  # commas and opening brackets in the body; a prompt's token count is about as high
    header_bytes: int = 64 << 10
    header_seconds: float = 15.0  # from the first byte, or the connection, to the last header
    body_seconds: float = 60.0  # from the last header to the body's end
    keep_alive_seconds: int = 60
    connections: int = 4096
    messages: int = 20_000
    tools: int = 2_048
    stop_strings: int = 64
    stop_characters: int = 1_024  # of one stop string
    choices: int = 8  # answers to one request (`n`, or several prompts)
    json_depth: int = 64  # of tool schemas and tool arguments
    requests: int = 256  # running and queued together


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    model_dir: str
    served_name: str  # the model id in every API
    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 1919  # 0: any free one; see `announce`
    other_port: bool = False  # where `port` is held, any free one, instead of an error
    api_key: str | None = None  # required when `host` is not a loopback address
    allowed_hosts: tuple[str, ...] = ()  # names a Host header may have besides loopback names and `host`
    max_output_tokens: int | None = None  # caps every request's own wish
    lease_dir: str | None = None  # end when nobody holds a lease there any more (ftengine.leases)
    lease_grace: float = 120.0  # seconds to wait for the first lease
    announce: str | None = None  # file that gets {"pid", "host", "port"} as JSON once the port listens
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    heartbeat_seconds: float = 8.0  # between two signs of life on a silent stream; clients give up after 300
    stall_seconds: float = 120.0  # a client that takes no byte for so long has left
    save_seconds: float = 30.0  # between two looks whether the server is idle and has answers to save
    look_seconds: float = 1.0  # between two looks whether others still find this server
    failure_seconds: float = 1.0  # /health keeps telling why the start failed, before the process ends
    limits: Limits = Limits()
