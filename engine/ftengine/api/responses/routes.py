"""POST /v1/responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ftengine.api import respond
from ftengine.api.body import read
from ftengine.api.front import Front
from ftengine.api.generate import Job
from ftengine.api.responses.output import ResponseFrame, whole
from ftengine.api.responses.request import ResponsesRequest, conversation, input_items
from ftengine.api.responses.stream import ResponseStream
from ftengine.api.sessions import openai_caller
from ftengine.api.translate import Notes


def routes(front: Front) -> list[Route]:
    limits = front.settings.limits

    async def responses(request: Request) -> Response:
        body = await read(request, ResponsesRequest, limits)
        front.check_model(body.model)
        items = input_items(body)
        front.check_counts(items, body.tools or (), field="input")
        call, notes = front.call("responses", request), Notes()
        source, tools = conversation(body, items, limits, notes)
        call.notes(notes.lines())
        job = Job(
            source=source,
            sampling=body,
            caller=openai_caller(request.headers, body.prompt_cache_key, body.user),
            max_tokens=body.max_output_tokens,
            one_call=body.parallel_tool_calls is False,
        )
        frame = ResponseFrame(body, front.settings.served_name)
        if body.stream:
            return await respond.stream(request, front, call, [job], ResponseStream(frame, tools))
        return await respond.collect(request, front, call, [job], lambda answers: whole(answers[0], frame, tools))

    return [Route("/v1/responses", responses, methods=["POST"])]
