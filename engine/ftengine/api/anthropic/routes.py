"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ftengine.api import respond
from ftengine.api.anthropic.message import whole
from ftengine.api.anthropic.request import MessagesRequest, conversation, job
from ftengine.api.anthropic.stream import MessageStream
from ftengine.api.body import read
from ftengine.api.front import Front
from ftengine.api.http import json_response, while_connected
from ftengine.api.sessions import claude_caller
from ftengine.api.translate import Notes


def routes(front: Front) -> list[Route]:
    limits = front.settings.limits

    async def checked(request: Request) -> MessagesRequest:
        body = await read(request, MessagesRequest, limits)
        front.check_model(body.model)
        front.check_counts(body.messages, body.tools or ())
        return body

    async def messages(request: Request) -> Response:
        body = await checked(request)
        call, notes = front.call("messages", request), Notes()
        caller = claude_caller(request.headers, body.metadata, body.system)
        wanted = job(body, caller, front.stops(body.stop_sequences, "stop_sequences"), limits, notes)
        call.notes(notes.lines())
        model = front.settings.served_name
        if body.stream:
            return await respond.stream(request, front, call, [wanted], MessageStream(model))
        return await respond.collect(request, front, call, [wanted], lambda answers: whole(answers[0], model))

    async def count_tokens(request: Request) -> Response:
        source = conversation(await checked(request), limits, Notes())
        return json_response({"input_tokens": await while_connected(request, front.generator.count(source))})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
