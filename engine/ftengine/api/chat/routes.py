"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ftengine.api import respond
from ftengine.api.body import read
from ftengine.api.chat.message import whole
from ftengine.api.chat.request import ChatRequest, conversation
from ftengine.api.chat.stream import ChatStream
from ftengine.api.front import Front
from ftengine.api.generate import Job
from ftengine.api.sessions import Caller, openai_caller
from ftengine.api.translate import Notes
from ftengine.conversation import Conversation


def routes(front: Front) -> list[Route]:
    limits, model = front.settings.limits, front.settings.served_name

    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatRequest, limits)
        front.check_model(body.model)
        front.check_counts(body.messages, body.tools or ())
        front.check_choices(body.n or 1, "n")
        call, notes = front.call("chat", request), Notes()
        source = conversation(body, limits, notes)
        call.notes(notes.lines())
        caller = openai_caller(request.headers, body.prompt_cache_key, body.user)
        jobs = _jobs(front, body, source, caller)
        freeform = frozenset(tool.name for tool in source.tools if tool.freeform)
        token_text = front.generator.token_text
        if not body.stream:
            return await respond.collect(
                request,
                front,
                call,
                jobs,
                lambda answers: whole(answers, model, freeform, token_text, bool(body.logprobs)),
            )
        encoder = ChatStream(
            model,
            len(jobs),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            freeform=freeform,
            token_text=token_text,
        )
        return await respond.stream(request, front, call, jobs, encoder)

    return [Route("/v1/chat/completions", chat_completions, methods=["POST"])]


def _jobs(front: Front, body: ChatRequest, source: Conversation, caller: Caller) -> list[Job]:
    return [
        Job(
            source=source,
            sampling=body,
            caller=caller,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            stops=front.stops(body.stop, "stop"),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            one_call=body.parallel_tool_calls is False,
            choice=choice,
        )
        for choice in range(body.n or 1)
    ]
