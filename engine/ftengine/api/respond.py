"""One way for all APIs from jobs to a response: prepare, then stream or collect.

A fault that is known before anything is sent becomes an HTTP error. When preparing takes longer than a heartbeat
(the engine is still loading), a stream is begun all the same and a later fault becomes its last event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ftengine.api.answer import Chunk
from ftengine.api.calls import Call
from ftengine.api.collect import Collected
from ftengine.api.front import Front
from ftengine.api.generate import Generator, Job, Prepared
from ftengine.api.http import json_response, while_connected
from ftengine.api.sse import EventStream
from ftengine.errors import FtError

log = logging.getLogger("ftengine.api")


class Encoder(Protocol):
    """One stream in an API's own events. Every method gives whole SSE frames, perhaps none."""

    def opening(self) -> bytes:
        """Sent with the headers."""
        ...

    def heartbeat(self) -> bytes: ...

    def chunk(self, choice: int, chunk: Chunk) -> bytes: ...

    def closing(self) -> bytes: ...

    def error(self, error: Exception) -> bytes:
        """The last frames of a stream that fails."""
        ...


async def stream(request: Request, front: Front, call: Call, jobs: Sequence[Job], encoder: Encoder) -> Response:
    """Raises what `Generator.prepare` raises, when that is known soon enough."""
    preparing = asyncio.ensure_future(front.generator.prepare(jobs))
    done, _ = await asyncio.wait({preparing}, timeout=front.settings.heartbeat_seconds)
    headers = _headers(preparing.result()) if done else {}
    return EventStream(
        request,
        _frames(front.generator, call, preparing, encoder),
        opening=encoder.opening(),
        heartbeat=encoder.heartbeat,
        on_error=lambda error: encoder.error(_logged(error)),
        interval=front.settings.heartbeat_seconds,
        stall=front.settings.stall_seconds,
        headers=headers,
    )


async def collect(
    request: Request,
    front: Front,
    call: Call,
    jobs: Sequence[Job],
    build: Callable[[list[Collected]], dict[str, Any]],
) -> Response:
    """The whole answer as one JSON body. Raises what the generator raises, and ClientLeft."""

    async def work() -> tuple[list[Collected], dict[str, str]]:
        prepared = await front.generator.prepare(jobs)
        answers = [Collected() for _ in prepared]
        async with aclosing(_merged(front.generator, call, prepared)) as chunks:
            async for choice, chunk in chunks:
                answers[choice].add(chunk)
        return answers, _headers(prepared)

    answers, headers = await while_connected(request, work())
    return json_response(build(answers), headers=headers)


def _headers(prepared: Sequence[Prepared]) -> dict[str, str]:
    """How many tokens an answer may have: what was asked for, or what there is room for."""
    return {"ft-max-tokens": str(prepared[0].request.sampling.max_tokens)}


async def _frames(
    generator: Generator, call: Call, preparing: asyncio.Future[list[Prepared]], encoder: Encoder
) -> AsyncGenerator[bytes, None]:
    try:
        prepared = await preparing
    finally:
        preparing.cancel()
    async with aclosing(_merged(generator, call, prepared)) as chunks:
        async for choice, chunk in chunks:
            yield encoder.chunk(choice, chunk)
    yield encoder.closing()


async def _merged(
    generator: Generator, call: Call, prepared: Sequence[Prepared]
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Several answers at once, each chunk with its answer's number. The first fault ends them all."""
    if len(prepared) == 1:
        async with aclosing(generator.stream(prepared[0], call)) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return

    queue: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue(maxsize=64)

    async def pump(choice: int, one: Prepared) -> None:
        try:
            async with aclosing(generator.stream(one, call)) as chunks:
                async for chunk in chunks:
                    await queue.put((choice, chunk))
            await queue.put(None)
        except Exception as error:  # carried to the reader, who raises it
            await queue.put(error)

    pumps = [asyncio.ensure_future(pump(choice, one)) for choice, one in enumerate(prepared)]
    try:
        left = len(pumps)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _logged(error: Exception) -> Exception:
    if not isinstance(error, FtError):
        log.error("a stream failed", exc_info=error)
    return error
