"""uvicorn's HTTP protocol with deadlines: a connection that sends its headers or body too slowly is dropped.

Besides, headers have a size limit, and the app may drop a connection whose client takes nothing (`sse.ABORT`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ftengine.api.settings import Limits
from ftengine.api.sse import ABORT

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def http_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn makes one for each connection; the limits ride on the class."""
    return type("DeadlineProtocol", (DeadlineProtocol,), {"limits": limits})


class DeadlineProtocol(HttpToolsProtocol):
    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._header_bytes = 0  # since the message began
        self._packet_bytes = 0  # of the packet that is being parsed, from its start or its last message's end
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._header_bytes += len(data)
        self._packet_bytes = len(data)
        super().data_received(data)
        # Looked at after parsing: the rest of a packet in which the headers end is body.
        if self._in_headers and self._header_bytes > self.limits.header_bytes and not self.transport.is_closing():
            # Not closed before the deadline: closing on unread data would take the answer back.
            self._refused = True
            self.transport.write(_TOO_LARGE)
            self.transport.write_eof()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"drop": self.transport.abort}}
        self._in_headers = True
        self._header_bytes = self._packet_bytes  # at most so much of this packet is headers
        self._limit(self.limits.header_seconds)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._limit(self.limits.body_seconds)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._limit(None)
        self._packet_bytes = 0
        super().on_message_complete()

    def _limit(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self.transport.abort()
