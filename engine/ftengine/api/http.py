"""Small pieces that every endpoint uses: JSON out, the body in, and leaving with the client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed the connection before its answer; nobody is there to be told."""


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def read_body(request: Request) -> bytearray:
    """The whole body, held once. The guard ends it with TooLarge at the limit. Raises ClientLeft."""
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


async def disconnected(request: Request) -> None:
    """Returns when the client has left. Only after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled, and over, when the client leaves first. Raises ClientLeft."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
