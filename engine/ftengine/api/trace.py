"""POST /v1/trace: the routing of the engine's next decode steps, as a file."""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ftengine.api.body import read
from ftengine.api.front import Front
from ftengine.api.http import while_connected
from ftengine.errors import BadRequest
from ftengine.wire import MOST_TRACE_STEPS

MEDIA_TYPE = "application/octet-stream"


class TraceRequest(msgspec.Struct):
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_TRACE_STEPS)]


def routes(front: Front) -> list[Route]:
    async def trace(request: Request) -> Response:
        wanted = await read(request, TraceRequest, front.settings.limits)
        found = await while_connected(request, front.engine.trace(wanted.steps))
        if found.refusal:
            raise BadRequest(found.refusal)
        return Response(found.data, media_type=MEDIA_TYPE)

    return [Route("/v1/trace", trace, methods=["POST"])]
