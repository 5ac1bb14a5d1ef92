"""Server-sent events: framing, heartbeats while nothing comes, and leaving with the client.

Knows nothing of what the frames say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ftengine.api.http import disconnected

log = logging.getLogger("ftengine.api")

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy in between must not collect the stream
}


def event(data: Any, name: str | None = None) -> bytes:
    """One frame. JSON has no raw line breaks, so one data line is always enough."""
    head = f"event: {name}\n".encode() if name else b""
    body = msgspec.json.encode(data)
    if not body.isascii():
        for raw, escaped in _LINE_ENDS:
            body = body.replace(raw, escaped)
    return head + b"data: " + body + b"\n\n"


# No line ends to SSE, but to clients that cut lines with their language's own function, such as Python's splitlines.
_LINE_ENDS = (("\x85".encode(), b"\\u0085"), ("\u2028".encode(), b"\\u2028"), ("\u2029".encode(), b"\\u2029"))


ABORT = "ftengine.abort"  # ASGI extension; its "drop" drops the connection
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class EventStream(Response):
    """Headers and `opening` go out at once, before `frames` has anything.

    heartbeat    called for a frame after each `interval` seconds of silence
    on_error     called for the last frame when `frames` raises
    stall        seconds after which a client that takes nothing counts as gone
    """

    def __init__(
        self,
        request: Request,
        frames: AsyncGenerator[bytes, None],
        *,
        opening: bytes,
        heartbeat: Callable[[], bytes],
        on_error: Callable[[Exception], bytes],
        interval: float,
        stall: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._request = request
        self._frames = frames
        self._opening = opening
        self._heartbeat = heartbeat
        self._on_error = on_error
        self._interval = interval
        self._stall = stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(disconnected(self._request))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._write(send, self._opening)
            async with aclosing(self._with_heartbeats(leaving)) as frames:
                async for frame in frames:
                    await self._write(send, frame)
            if not leaving.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.TimeoutError:
            log.info("a client took no byte for %g s and was left", self._stall)
            abort(scope)
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    async def _with_heartbeats(self, leaving: asyncio.Future[None]) -> AsyncGenerator[bytes, None]:
        """The frames, then, if they raise, the error's; ends early when the client leaves."""
        pending: asyncio.Future[bytes] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(_next(self._frames))
                await asyncio.wait((pending, leaving), timeout=self._interval, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    return
                if not pending.done():
                    yield self._heartbeat()
                    continue
                done, pending = pending, None
                yield done.result()
        except _End:
            return
        except Exception as error:
            yield self._on_error(error)
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            await self._frames.aclose()

    async def _write(self, send: Send, frame: bytes) -> None:
        """Raises asyncio.TimeoutError when the client takes nothing for `stall` seconds."""
        if frame:
            await asyncio.wait_for(send({"type": "http.response.body", "body": frame, "more_body": True}), self._stall)


async def _next(frames: AsyncIterator[bytes]) -> bytes:
    try:
        return await frames.__anext__()
    except StopAsyncIteration:
        raise _End from None


class _End(Exception):
    """StopAsyncIteration for a task's result."""


def abort(scope: Scope) -> None:
    """Drop the connection with all that is still to be written to it, where the HTTP protocol offers that."""
    extension = scope.get("extensions", {}).get(ABORT)
    if extension is not None:
        extension["drop"]()
